"""Prompts whose keys and values are compacted once they are read."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as upstream

from ..logger import layers, warn
from ..policy import whole_number
from ..upstream.caches import fresh_caches, plain_layers
from ..upstream.hooks import copied_as, subclass
from .compact_cache import UNSEEN, BatchCompactCache, CompactCache
from .observation import observed
from .snapkv import SnapKV

_KINDS = (CompactCache, BatchCompactCache)


class CompactPromptCache(list):
    """A list of a cache for each layer, to pass as ``prompt_cache`` in mlx-lm.

    Attributes
    ----------
    skipped_layers : dict of int to str
        Layers that weren't compacted, and why.
    """

    skipped_layers: dict[int, str]


def compact_prompt_cache(
    model: nn.Module,
    prompt: Any,
    budget: int | SnapKV,
    *,
    prompt_cache: list[Any] | None = None,
    prefill_step_size: int = 2048,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
) -> CompactPromptCache:
    """Read a prompt, and keep a budget of rows of each key-value head.

    The whole prompt is held while it is read. Then the last queries' attention decides
    which rows each head of each layer keeps. Positions stay as they were. Source: Li et
    al. 2024, "SnapKV"; the sinks are Xiao et al. 2023's.

    Parameters
    ----------
    model : mlx.nn.Module
        A model of mlx-lm.
    prompt : mx.array or list of int, shape (L,)
        All of its tokens are read: generation continues with the next one.
    budget : int or SnapKV
        Rows to keep of each head, or all settings of the method.
    prompt_cache : list, optional
        The prompt cache of earlier turns; it is updated in place, as in mlx-lm. Their
        last queries score rows too, where nothing was dropped or decoded since.
    prefill_step_size : int, default=2048
        Tokens of a prefill step. The rows kept don't depend on it; the rest depends on
        it by rounding only.
    prompt_progress_callback : callable, optional
        Called with the tokens read and their total, as mlx-lm's.

    Returns
    -------
    CompactPromptCache
        A ``CompactCache`` for each layer that has a plain ``KVCache``. Other layers
        (sliding, recurrent, latent, quantised) keep upstream's cache;
        ``skipped_layers`` names them.

    Raises
    ------
    TypeError
        A prompt that is text, or a model that is no ``mlx.nn.Module``.
    ValueError
        An impossible count, or a prompt that is empty or no sequence of whole numbers.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an mlx.nn.Module, not {model!r}")
    if isinstance(prompt, (str, bytes)):
        raise TypeError("prompt must be tokens, not text: tokenizer.encode(prompt)")
    if prompt_cache is not None and not (
        isinstance(prompt_cache, list) and prompt_cache
    ):
        raise ValueError("prompt_cache must be a list with a cache for each layer")
    method = budget if isinstance(budget, SnapKV) else SnapKV(budget)
    method.check_room()
    tokens = mx.array(prompt)
    if tokens.ndim != 1 or tokens.size == 0:
        raise ValueError(
            f"prompt must be one sequence of tokens, not of shape {tokens.shape}"
        )
    if not mx.issubdtype(tokens.dtype, mx.integer):
        raise ValueError(f"prompt must be whole numbers, not {tokens.dtype}")
    prefill_step_size = whole_number("prefill_step_size", prefill_step_size, 1)
    progress = prompt_progress_callback or (lambda *_: None)
    caches = fresh_caches(model) if prompt_cache is None else prompt_cache
    make_compactable(model, caches)
    read = compacting(model, method, tokens.size)
    progress(0, tokens.size)
    for start in range(0, tokens.size, prefill_step_size):
        chunk = tokens[start : start + prefill_step_size]
        read(chunk[None], cache=caches)
        mx.eval([cache.state for cache in caches if not cache.empty()])
        mx.clear_cache()
        progress(min(start + prefill_step_size, tokens.size), tokens.size)
    result = CompactPromptCache(caches)
    result.skipped_layers = skipped_layers(caches, method)
    return result


def make_compactable(model: nn.Module, caches: list[Any]) -> None:
    """Replace each plain cache by a ``CompactCache`` that holds the same rows."""
    for layer in plain_layers(model, caches):
        caches[layer] = CompactCache(caches[layer])


def compacting(
    model: nn.Module,
    method: SnapKV,
    tokens: int,
    read: Callable[[list[Any]], object] | None = None,
    done: Callable[[list[Any]], object] | None = None,
) -> nn.Module:
    """A model that compacts its caches once it has read that many tokens.

    For code that calls a model with a prompt in steps. Until then the queries of its
    layers are observed. Later calls go to the model itself. ``read`` is given the
    caches while they are whole, ``done`` once they are compacted.
    """

    @functools.wraps(type(model).__call__)
    def call(facade, *arguments, **named):
        return vars(facade)["reading"](*arguments, **named)

    facade = copied_as(model, subclass(type(model), __call__=call))
    vars(facade)["reading"] = _Reading(model, method, tokens, read, done)
    return facade


class _Reading:
    """Observes the steps of a prompt, then compacts, then only calls the model."""

    def __init__(self, model, method, tokens, read, done):
        self._model = model
        self._view = observed(model) if tokens > 0 else model
        self._method = method
        self._left = tokens
        self._read, self._done = read, done
        self._compacted = False

    def __call__(self, inputs, *arguments, cache=None, **named):
        if self._left > 0:
            with observing(cache, self._method.window_size):
                result = self._view(inputs, *arguments, cache=cache, **named)
            embeddings = named.get("input_embeddings")
            self._left -= (inputs if embeddings is None else embeddings).shape[1]
            if self._left <= 0:
                self._compact(cache)
            return result
        if not self._compacted:  # nothing had to be read before the last token
            self._compact(cache)
        return self._model(inputs, *arguments, cache=cache, **named)

    def _compact(self, cache):
        if self._read:
            self._read(cache)
        compact(cache, self._method)
        self._compacted, self._view = True, None
        if self._done:
            self._done(cache)


def to_read_again(caches: list[Any], coming: int, method: SnapKV) -> int:
    """How many tokens have to be read again for a full observation window.

    Parameters
    ----------
    caches : list
        Whole caches that a prompt goes on from.
    coming : int
        How many of its tokens are still to be read.
    method : SnapKV
        How they are compacted then.
    """
    ours = [cache for cache in caches if isinstance(cache, CompactCache)]
    if not ours or method.covers(tokens := ours[0].offset + coming):
        return 0
    queries = min(method.window_size, tokens)
    fewest = min(cache.observed_queries for cache in ours)
    # A trimmed token takes its query along.
    return (queries - coming) * (fewest + coming < queries)


@contextmanager
def observing(caches: list[Any], window_size: int) -> Iterator[None]:
    """Have caches keep the newest queries inside a ``with`` block."""
    ours = [cache for cache in caches if isinstance(cache, _KINDS)]
    for cache in ours:
        cache.keep_queries(window_size)
    try:
        yield
    finally:
        for cache in ours:
            cache.keep_queries(None)


def compact(caches: list[Any], method: SnapKV) -> None:
    """Compact each cache of a list that can be compacted, in place."""
    for layer, cache in enumerate(caches):
        fit = isinstance(cache, _KINDS) and cache.attention.unfit is None
        if fit and cache.observed:
            caches[layer] = cache.compact(method) or cache


def skipped_layers(caches: list[Any], method: SnapKV) -> dict[int, str]:
    """Layers that a budget doesn't reach, and why."""
    return {
        layer: reason
        for layer, cache in enumerate(caches)
        if (reason := _why_skipped(cache, method))
    }


def _why_skipped(cache: Any, method: SnapKV) -> str | None:
    unfit = _why_unfit(cache)
    return unfit or cache.why_skipped(method)


def _why_unfit(cache: Any) -> str | None:
    if isinstance(cache, _KINDS):
        return None
    if type(cache) in (upstream.KVCache, upstream.BatchKVCache):
        return "other layers read its cache"
    name = type(cache).__name__
    return f"its cache is {'an' if name[0] in 'AEIOU' else 'a'} {name}"


def out_of_budget(model: nn.Module, caches: list[Any]) -> dict[int, str]:
    """Layers that no budget can reach, and why, by the kind of cache and attention.

    A step of two tokens shows what each layer's attention reads. MLX computes nothing
    of it, since nobody looks at the result.
    """
    tried = fresh_caches(model)
    make_compactable(model, tried)
    with observing(tried, SnapKV(1).window_size):
        observed(model)(mx.zeros((1, 2), mx.int32), cache=tried)
    whole = {}
    for layer, cache in enumerate(caches):
        if type(cache) is upstream.KVCache and isinstance(tried[layer], CompactCache):
            cache = tried[layer]
        unfit = cache.attention.unfit if isinstance(cache, _KINDS) else None
        if reason := _why_unfit(cache) or unfit:
            whole[layer] = reason
    return whole


def warn_of_skipped(caches: list[Any], method: SnapKV) -> None:
    """Warn of layers that a budget should have reached, by what their cache held.

    Those that it can't reach are in the model's line.
    """
    whole = {
        layer: reason
        for layer, reason in skipped_layers(caches, method).items()
        if isinstance(caches[layer], _KINDS)
        and caches[layer].attention.unfit in (None, UNSEEN)
    }
    if whole:
        warn(
            f"{len(whole)} of {len(caches)} layers are left whole in spite of the "
            f"budget ({counted(whole)})"
        )


def counted(reasons: dict[int, str]) -> str:
    """Reasons by layer, in words: each with the number of its layers."""
    counts = Counter(reasons.values())
    return "; ".join(f"in {layers(n)} {why}" for why, n in counts.items())
