"""Target ``rotating``: windows that keep first tokens, in mlx-lm's rotating caches.

Upstream file: ``mlx_lm/models/cache.py``. ``RotatingKVCache(max_size, keep)`` holds the
first ``keep`` tokens, but its mask hides them in steps of several tokens, its batches
lose them, and ``make_prompt_cache(model, max_kv_size)`` ignores the size where a
model has a ``make_cache``. Caches without ``keep``, such as those of a model's own
sliding layers, are left alone.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..policy import PolicyError, SinkPolicy
from ..upstream.caches import fresh_caches, kinds, plain_layers, prompt_caches
from ..variable import VARIABLE
from ..windows.rotating import RotatingSinkBatch, rotating_mask
from ..windows.sink_cache import SinkCache
from ..windows.speculation import speculating
from ..windows.window import Window
from .patch import Patch, Reach, Site, Use, by_name, everywhere, present

WITHOUT = f'{VARIABLE}="rotating=0" goes back to upstream\'s windows'
UNQUANTISED = (
    "mlx-lm can't quantise a rotating window: leave out kv_bits or max_kv_size "
    f"({WITHOUT})"
)


class RotatingPatch(Patch):
    """Replaces what loses the ``keep`` first tokens of ``RotatingKVCache``."""

    def sites(self, module: ModuleType) -> Iterator[Site]:
        """Methods of ``RotatingKVCache``, and functions that make one.

        In mlx-lm 0.31 the batch generator makes windows itself, without kept tokens.
        A draft model's rejected tokens are trimmed, also past what a window evicted.
        """
        for name in ("make_mask", "merge", "to_quantized", "trim"):
            yield Site(module.RotatingKVCache, name, getattr(self, f"_{name}"))
        yield from everywhere(module, "make_prompt_cache", self._make_prompt_cache)
        yield from everywhere(module, "trim_prompt_cache", self._trim_prompt_cache)
        generate = sys.modules.get("mlx_lm.generate")
        generator = getattr(generate, "BatchGenerator", None)
        if hasattr(generator, "_make_new_cache"):
            yield Site(generator, "_make_new_cache", self._make_new_cache)
        for name in ("generate_step", "speculative_generate_step", "stream_generate"):
            if hasattr(generate, name):
                yield from everywhere(generate, name, getattr(self, f"_{name}"))

    def guards(self, module: ModuleType, refuse) -> list[Site]:
        """Windows without kept tokens, as of a model's own sliding layers, pass."""

        def keeping(cache, *_, **__):
            if cache.keep:
                refuse()

        def merged(_, caches):
            if any(cache.keep for cache in caches):
                refuse()

        def made(model, max_kv_size=None):
            if max_kv_size is not None:
                refuse()

        makers = everywhere(module, "make_prompt_cache", made)
        return [
            *(makers if hasattr(module, "make_prompt_cache") else ()),
            *present(module, ["RotatingKVCache.make_mask"], keeping),
            *present(module, ["RotatingKVCache.merge"], merged),
        ]

    def reach(self, use: Use, policy: SinkPolicy | None) -> Reach | None:
        if policy is None:
            return None
        size, layers = use.max_kv_size, len(use.caches)
        found = {n: self._window(cache) for n, cache in enumerate(use.caches)}
        windows = {n: window for n, window in found.items() if window}
        if not policy.sinks and size is not None:  # ours keep nothing then
            plain = plain_layers(use.model, fresh_caches(use.model))
            windows |= dict.fromkeys(plain, Window(size, 0))
        kept = " and ".join(
            f"{window.sinks} sinks in a window of {window.size:,} tokens, in "
            f"{count} of {layers} layers"
            for window, count in Counter(windows.values()).items()
        )
        if size is None or len(windows) == layers:
            return Reach(kept) if kept else None
        others = kinds(c for n, c in enumerate(use.caches) if n not in windows)
        missed = (
            "the window leaves the others as they are"
            if windows
            else f"a window of {size:,} tokens has no effect"
        )
        return Reach(kept, f"{missed} ({others})")

    def _window(self, cache: Any) -> Window | None:
        """The window of a cache that keeps first tokens."""
        if isinstance(cache, SinkCache):
            return cache.window
        rotating = sys.modules[self.target.module].RotatingKVCache
        if isinstance(cache, rotating) and cache.keep:
            return Window(cache.max_size, cache.keep)
        return None

    def keeps(self, policy: SinkPolicy) -> str:
        return f"{policy.sinks} sinks of rotating windows"

    def mends(self, policy: SinkPolicy) -> bool:
        return policy.sinks > 0

    def self_check(self, module: ModuleType) -> str | None:
        upstream = module.RotatingKVCache
        window = Window(size=6, sinks=2)
        for cuts in _CUTS:
            cache, fed = upstream(max_size=window.size, keep=window.sinks), 0
            for N in cuts:
                mask = rotating_mask(cache, N)
                seen = _seen_by_each(cache, _numbered(fed, N), mask)
                fed += N
                if seen != _expected(window, fed, N):
                    return (
                        f"a RotatingKVCache holds unexpected tokens after steps {cuts}"
                    )
            again = RotatingSinkBatch.merge([cache]).extract(0)
            for each in (cache, again):
                seen = _seen_by_each(each, _numbered(fed, 1), None)
                if seen != _expected(window, fed + 1, 1):
                    return f"a RotatingKVCache differs after a batch, after {cuts}"
        make = Site(module, "make_prompt_cache", self._make_prompt_cache).upstream
        (made,) = make(SimpleNamespace(layers=[None]), window.size)
        if type(made) is not upstream or made.max_size != window.size:
            return "make_prompt_cache makes another cache than a RotatingKVCache"
        return None

    def faults(self, module: ModuleType) -> list[str]:
        window, found = Window(size=6, sinks=2), []
        cache = module.RotatingKVCache(max_size=window.size, keep=window.sinks)
        for fed, N in ((4, 4), (9, 5)):
            seen = _seen_by_each(cache, _numbered(fed - N, N), cache.make_mask(N))
        if seen != _expected(window, fed, N):
            found.append("a step of several tokens hides a window's first ones")
        batch = module.RotatingKVCache.merge([cache])
        for fed in range(9, 9 + 2 * window.size):
            seen = _seen_by_each(batch, _numbered(fed, 1), batch.make_mask(1))
        if not seen[0] >= set(range(window.sinks)):
            found.append("batches drop a window's first tokens")
        model = SimpleNamespace(layers=[None], make_cache=lambda: [module.KVCache()])
        if type(module.make_prompt_cache(model, window.size)[0]) is module.KVCache:
            found.append("max_kv_size is overlooked where a model makes its caches")
        return found

    def _make_mask(
        self, policy, upstream, cache, N, window_size=None, return_array=False
    ):
        if not cache.keep:
            return upstream(cache, N, window_size, return_array)
        self.say()
        return rotating_mask(cache, N, window_size, return_array)

    def _merge(self, policy, upstream, cls, caches):
        if not any(cache.keep for cache in caches):
            return upstream(cls, caches)
        self.say()
        return RotatingSinkBatch.merge(caches)

    def _to_quantized(self, policy, upstream, cache, *arguments, **named):
        if not cache.keep:
            return upstream(cache, *arguments, **named)
        raise PolicyError(UNQUANTISED)

    def _trim(self, policy, upstream, cache, n):
        if cache.keep and n > 0 and not cache.is_trimmable():
            raise ValueError(
                f"can't trim {n} tokens: the window of {cache.max_size} has evicted "
                "what earlier tokens saw; prefill anew"
            )
        return upstream(cache, n)

    def _trim_prompt_cache(self, policy, upstream, cache, num_tokens):
        """All layers or none: each is asked before the first is trimmed."""
        if all(each.is_trimmable() for each in cache):
            for each in cache:
                if check := getattr(each, "check_trim", None):
                    check(num_tokens)
        return upstream(cache, num_tokens)

    def _make_prompt_cache(self, policy, upstream, model, max_kv_size=None, **more):
        if max_kv_size is None:
            caches = upstream(model, **more)
            self.tell(model, caches)
            return caches
        try:
            window = Window(max_kv_size, policy.sinks)
        except ValueError as error:
            reason = str(error).replace("window", "max_kv_size")
            raise PolicyError(
                f'{reason} (sinks: {VARIABLE}="sinks=N"; {WITHOUT})'
            ) from None
        caches = upstream(model, **more)
        for layer in plain_layers(model, caches):
            caches[layer] = sys.modules[self.target.module].RotatingKVCache(
                max_size=window.size, keep=window.sinks
            )
        self.tell(model, caches, max_kv_size)
        return caches

    def _generate_step(self, policy, upstream, prompt, model, *arguments, **named):
        self._refuse_to_quantise(named, model)
        return upstream(prompt, model, *arguments, **named)

    def _speculative_generate_step(
        self, policy, upstream, prompt, model, draft_model, *arguments, **named
    ):
        self._refuse_to_quantise(named, model, draft_model)
        drafts = by_name(upstream, (), named)["num_draft_tokens"]
        caches = prompt_caches(named, model, draft_model)
        # Upstream trims once more where it is interrupted just after a trim.
        with speculating(caches, max(1, 2 * drafts)):
            try:
                yield from upstream(prompt, model, draft_model, *arguments, **named)
            except ValueError as error:
                # It trims as it ends, whatever ends it: that matters more.
                raise (error.__context__ or error) from None

    def _refuse_to_quantise(self, named: dict[str, Any], *models: nn.Module) -> None:
        """Before the first token: upstream quantises after thousands of them."""
        if named.get("kv_bits") is None:
            return
        asked = named.get("max_kv_size") is not None
        asked = asked and named.get("prompt_cache") is None
        made = asked and any(plain_layers(each, fresh_caches(each)) for each in models)
        if made or any(map(self._window, prompt_caches(named, *models))):
            raise PolicyError(UNQUANTISED)

    def _stream_generate(self, policy, upstream, *arguments, **named):
        """Beside a draft model upstream drops ``max_kv_size``: caches come along."""
        given = by_name(upstream, arguments, named)
        size, draft = named.get("max_kv_size"), given["draft_model"]
        if None not in (size, draft) and named.get("prompt_cache") is None:
            prompt_caches(named, given["model"], draft)
            del named["max_kv_size"]
        yield from upstream(*arguments, **named)

    def _make_new_cache(self, policy, upstream, generator):
        maker = sys.modules[self.target.module].make_prompt_cache
        return maker(generator.model, generator.max_kv_size)


# How the self-check fills a window of six: the tokens of each call.
_CUTS = ((3,), (4, 2), (9,), (4, 5, 1, 3), (1,) * 9, (9, 1, 4, 1, 1))


def _numbered(first: int, N: int) -> mx.array:
    """Keys that are their own positions."""
    return mx.arange(first, first + N).astype(mx.float32).reshape(1, 1, N, 1)


def _seen_by_each(cache: Any, keys: mx.array, mask: Any) -> list[set[int]]:
    """The positions that each query of a step sees."""
    N, held = keys.shape[2], np.array(cache.update_and_fetch(keys, keys)[0]).ravel()
    if mask is None or isinstance(mask, str):
        mask = np.tri(N, held.size, held.size - N, dtype=bool)
    rows = np.array(mask).reshape(N, held.size)
    return [set(held[row].astype(int)) for row in rows]


def _expected(window: Window, fed: int, N: int) -> list[set[int]]:
    return [
        {p for p in range(q + 1) if p < window.sinks or q - p < window.recent}
        for q in range(fed - N, fed)
    ]
