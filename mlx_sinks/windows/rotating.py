"""Upstream's rotating caches with their first tokens visible, alone and in batches.

Upstream file: ``mlx_lm/models/cache.py``, ``RotatingKVCache`` with ``keep``.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as upstream

from .sink_cache import BatchSinkCache, SinkCache
from .window import Window


class RotatingSinkBatch(BatchSinkCache):
    """Several ``RotatingKVCache``s side by side, each with its own first tokens."""

    @classmethod
    def merge(cls, caches: list[Any]) -> RotatingSinkBatch:
        """One cache of several sequences."""
        return super().merge([as_sink_cache(cache) for cache in caches])

    def extract(self, index: int) -> Any:
        """One sequence, as upstream's own cache."""
        held = super().extract(index)
        cache = upstream.RotatingKVCache(
            max_size=held.window.size, keep=held.window.sinks
        )
        continue_from(held, cache)
        return cache


def rotating_mask(
    cache: Any, N: int, window_size: int | None = None, return_array: bool = False
) -> mx.array | str | None:
    """``RotatingKVCache.make_mask`` with the first ``keep`` tokens visible.

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


def as_sink_cache(cache: Any) -> SinkCache:
    """A cache that continues from a ``RotatingKVCache``, with the same window."""
    if cache.keys is None:
        return SinkCache(cache.max_size, cache.keep)
    keys, values = map(cache._temporal_order, (cache.keys, cache.values))
    return SinkCache.of(cache.max_size, cache.keep, cache.offset, keys, values)


def continue_from(held: SinkCache, cache: Any) -> None:
    """Have a ``RotatingKVCache`` continue from a cache with the same window."""
    if not held.empty():
        cache.keys, cache.values = held.in_order()
        cache.offset, cache._idx = held.offset, held.size()
