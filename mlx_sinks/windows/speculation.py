"""Windows under speculative decoding, which trims the drafts that it rejects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mlx_lm.models import cache as upstream

from .rotating import as_sink_cache, continue_from
from .sink_cache import SinkCache


@contextmanager
def speculating(caches: list[Any], tokens: int) -> Iterator[None]:
    """Have windows hold what a trim brings back, until the block ends.

    Upstream's rotating caches, which can't, are replaced in the list for so long. After
    the block each cache holds its window alone, as if the trimmed tokens had never been
    read.

    Parameters
    ----------
    caches : list
        A prompt cache, of one sequence. Other kinds of caches are left alone.
    tokens : int
        How many tokens can be trimmed after a step.

    Raises
    ------
    ValueError
        A window with local positions.
    """
    windows = {
        place: cache
        for place, cache in enumerate(caches)
        if type(cache) in (SinkCache, upstream.RotatingKVCache)
    }
    reserving = {
        place: cache if isinstance(cache, SinkCache) else as_sink_cache(cache)
        for place, cache in windows.items()
    }
    for cache in reserving.values():
        cache.check_reserve(tokens)
    for place, cache in reserving.items():
        cache.reserve(tokens)
        caches[place] = cache
    try:
        yield
    finally:
        for place, cache in reserving.items():
            cache.reserve(0)
            if cache is not windows[place]:
                continue_from(cache, windows[place])
            caches[place] = windows[place]
