"""mlx-lm's caches, and what our own caches need to work with mlx-lm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as upstream


class OwnCache(upstream._BaseCache):
    """A cache that mlx-lm can save and load on every supported release."""

    @classmethod
    def from_state(cls, state, meta_state=None):
        """As upstream's; mlx-lm 0.31 gives a ``meta_state``, which is always empty."""
        cache = cls.__new__(cls)
        cache.state = state
        return cache


def register(*kinds: type) -> None:
    """Let ``load_prompt_cache`` find classes: it looks them up in upstream's module."""
    for kind in kinds:
        vars(upstream).setdefault(kind.__name__, kind)


def apart(arrays: Iterable[mx.array]) -> list[mx.array]:
    """The same values as arrays of their own: a cache writes into the ones it holds."""
    return [array[...] for array in arrays]


def integers(numbers: Any) -> list[int]:
    return numbers.tolist() if isinstance(numbers, mx.array) else list(numbers)


def stacked(rows: list[mx.array | None], sizes: list[int]) -> mx.array | None:
    """Arrays of sequences in one batch, with as many columns as the longest has."""
    known = [array for array in rows if array is not None]
    if not known:
        return None
    _, H, _, *D = known[0].shape
    T = max(array.shape[2] for array in known)
    padded = [
        mx.zeros((size, H, T, *D), known[0].dtype)
        if array is None
        else mx.pad(
            array, [(0, 0), (0, 0), (0, T - array.shape[2]), *[(0, 0)] * len(D)]
        )
        for array, size in zip(rows, sizes)
    ]
    return mx.concatenate(padded, axis=0)


def prompt_caches(named: dict[str, Any], *models: nn.Module) -> list[Any]:
    """A call's prompt cache, or a new one, as a list to be updated in place.

    Parameters
    ----------
    named : dict
        The call's named arguments. ``prompt_cache`` becomes the list.
    models : mlx.nn.Module
        Those that the call generates with; a draft model comes last.
    """
    caches = named.get("prompt_cache")
    if caches is None:
        size = named.get("max_kv_size")
        make = upstream.make_prompt_cache  # looked up now: it may be patched
        caches = [cache for model in models for cache in make(model, size)]
    named["prompt_cache"] = caches if isinstance(caches, list) else list(caches)
    return named["prompt_cache"]


def fresh_caches(model: nn.Module) -> list[Any]:
    """Upstream's caches, whatever ``make_prompt_cache`` is patched to say."""
    if hasattr(model, "make_cache"):
        return model.make_cache()
    return [upstream.KVCache() for _ in model.layers]


def flat(caches: Iterable[Any]) -> Iterator[Any]:
    """Caches, and those that lists of caches hold."""
    for cache in caches:
        yield from flat(cache.caches) if hasattr(cache, "caches") else (cache,)


def kinds(caches: Iterable[Any]) -> str:
    """How many caches there are of each class, in words."""
    found = Counter(type(cache).__name__ for cache in caches)
    return ", ".join(f"{count} {name}" for name, count in found.items())


def plain_layers(model: nn.Module, caches: list[Any]) -> list[int]:
    """Layers whose cache is a plain ``KVCache``.

    There are none where a layer has no cache of its own: it may read another layer's
    cache, in which a window no longer holds what that layer has seen.
    """
    if len(caches) != len(getattr(model, "layers", ())):
        return []
    return [n for n, cache in enumerate(caches) if type(cache) is upstream.KVCache]
