"""Target ``rotating``: windows that keep first tokens, in mlx-lm's rotating caches.

Upstream file: ``mlx_lm/models/cache.py``. ``RotatingKVCache(max_size, keep)`` holds the
first ``keep`` tokens, but its mask hides them in steps of several tokens, its batches
lose them, and ``make_prompt_cache(model, max_kv_size)`` overlooks the size where a
model has a ``make_cache``. Caches without ``keep``, such as those of a model's own
sliding layers, are left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np

from ..policy import VARIABLE, PolicyError, SinkPolicy
from ..upstream.caches import plain_layers
from ..windows.prompt_cache import warn_of_others
from ..windows.sink_cache import BatchSinkCache, SinkCache
from ..windows.window import Window
from .patch import FunctionsPatch

WITHOUT = f'{VARIABLE}="rotating=0" goes back to upstream\'s windows'


class RotatingPatch(FunctionsPatch):
    """Replaces what loses the ``keep`` first tokens of ``RotatingKVCache``."""

    name = "rotating"
    module = "mlx_lm.models.cache"
    supported = ">=0.31.3,<0.33"

    def keeps(self, policy: SinkPolicy) -> str:
        return f"{policy.sinks} sinks of rotating windows"

    def self_check(self, module: ModuleType, version: str) -> str | None:
        if reason := self._replaced_by_others(module):
            return reason
        upstream = module.RotatingKVCache
        window = Window(size=6, sinks=2)
        for cuts in _CUTS:
            cache, fed = upstream(max_size=window.size, keep=window.sinks), 0
            for N in cuts:
                mask = rotating_mask(cache, N)
                seen = _seen_by_each(cache, _numbered(fed, N), mask)
                fed += N
                if seen != _expected(window, fed, N):
                    return f"a RotatingKVCache holds its tokens otherwise, after {cuts}"
            again = RotatingSinkBatch.merge([cache]).extract(0)
            for each in (cache, again):
                seen = _seen_by_each(each, _numbered(fed, 1), None)
                if seen != _expected(window, fed + 1, 1):
                    return f"a RotatingKVCache differs after a batch, after {cuts}"
        make = self._upstream(module, "make_prompt_cache")
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

    def _sites(self, module: ModuleType) -> Iterator[tuple[Any, str, Callable]]:
        """What is replaced, where, and by what.

        ``make_prompt_cache`` wherever a module has it by that name; and in mlx-lm 0.31
        the batch generator, which makes windows itself, without kept tokens.
        """
        for name in ("make_mask", "merge", "to_quantized"):
            yield module.RotatingKVCache, name, getattr(self, f"_{name}")
        for holder in list(sys.modules.values()):
            function = getattr(holder, "__dict__", {}).get("make_prompt_cache")
            if getattr(function, "__module__", None) == module.__name__:
                yield holder, "make_prompt_cache", self._make_prompt_cache
        generate = sys.modules.get("mlx_lm.generate")
        generator = getattr(generate, "BatchGenerator", None)
        if hasattr(generator, "_make_new_cache"):
            yield generator, "_make_new_cache", self._make_new_cache

    def _make_mask(self, upstream, cache, N, window_size=None, return_array=False):
        if not cache.keep:
            return upstream(cache, N, window_size, return_array)
        self._say()
        return rotating_mask(cache, N, window_size, return_array)

    def _merge(self, upstream, cls, caches):
        if not any(cache.keep for cache in caches):
            return upstream(cls, caches)
        self._say()
        return RotatingSinkBatch.merge(caches)

    def _to_quantized(self, upstream, cache, *arguments, **named):
        if not cache.keep:
            return upstream(cache, *arguments, **named)
        raise PolicyError(
            "mlx-lm can't quantise a rotating window: leave out kv_bits or max_kv_size "
            f"({WITHOUT})"
        )

    def _make_prompt_cache(self, upstream, model, max_kv_size=None):
        if max_kv_size is None:
            return upstream(model)
        try:
            window = Window(max_kv_size, self._policy.sinks)
        except ValueError as error:
            reason = str(error).replace("window", "max_kv_size")
            raise PolicyError(
                f'{reason} (sinks: {VARIABLE}="sinks=N"; {WITHOUT})'
            ) from None
        caches = upstream(model)
        plain = plain_layers(model, caches)
        if plain:
            self._say()
        for layer in plain:
            caches[layer] = sys.modules[self.module].RotatingKVCache(
                max_size=window.size, keep=window.sinks
            )
        warn_of_others(model, caches, plain)
        return caches

    def _make_new_cache(self, upstream, generator):
        maker = sys.modules[self.module].make_prompt_cache
        return maker(generator.model, generator.max_kv_size)


class RotatingSinkBatch(BatchSinkCache):
    """Several ``RotatingKVCache``s side by side, each with its own first tokens."""

    @classmethod
    def merge(cls, caches: list[Any]) -> RotatingSinkBatch:
        """One cache of several sequences."""
        return super().merge([_as_sink_cache(cache) for cache in caches])

    def extract(self, index: int) -> Any:
        """One sequence, as upstream's own cache."""
        held = super().extract(index)
        cache = sys.modules[RotatingPatch.module].RotatingKVCache(
            max_size=held.window.size, keep=held.window.sinks
        )
        if not held.empty():
            cache.keys, cache.values = held.in_order()
            cache.offset, cache._idx = held.offset, held.size()
        return cache


def rotating_mask(
    cache: Any, N: int, window_size: int | None = None, return_array: bool = False
) -> mx.array | str | None:
    """``RotatingKVCache.make_mask`` with the first ``keep`` tokens in sight.

    The query at position ``p`` sees them and the ``max_size - keep`` newest tokens up
    to itself, as in upstream's decode; ``window_size``, the model's own sliding window,
    narrows what is recent.
    """
    window, seen = Window(cache.max_size, cache.keep), cache.offset
    narrow = window.narrowed_by(window_size)
    if N == 1:
        if not narrow or seen < window_size:
            return None
        columns = np.arange(min(seen + 1, window.size))
        newest = cache._idx if cache._idx < window.size else window.sinks
        positions = seen - (newest - columns) % window.recent
    else:
        # A step's tokens follow at most max_size - 1 earlier ones, in order of time.
        held = min(seen, window.size - 1)
        if held + N <= window.size and not (narrow or return_array):
            return "causal"
        columns = np.arange(held + N)
        positions = columns + seen - held
    positions = np.where(columns < window.sinks, columns, positions)
    queries = np.arange(seen, seen + N)
    return window.visible(positions[None], queries[None], window_size)[0, 0]


def _as_sink_cache(cache: Any) -> SinkCache:
    if cache.keys is None:
        return SinkCache(cache.max_size, cache.keep)
    keys, values = map(cache._temporal_order, (cache.keys, cache.values))
    return SinkCache.of(cache.max_size, cache.keep, cache.offset, keys, values)


# How the self-check feeds a window of six: tokens a call.
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
