"""The top-k with the guarantee: from scores to selected columns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import mlx.core as mx

from ..policy import SinkPolicy
from .blocks import by_blocks
from .columns import columns_to_force

LARGEST = mx.finfo(mx.float32).max


class Scores(Protocol):
    """Scores that are computed block by block, as the selection needs them."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, 1, L, T)"""

    @property
    def rows(self) -> int:
        """Number of queries in a block."""

    def block(self, rows: slice) -> mx.array:
        """(B, 1, rows, T)"""


Watcher = Callable[[mx.array, mx.array | None, mx.array | None], object]
_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Show a function what each selection inside the ``with`` block is made from.

    It is called before the selection with all ``scores`` in one array, and with
    ``left_padding`` and ``mask`` as ``select_columns`` got them. It is not called where
    nothing is selected (``T <= index_topk``), nor for other threads' selections.
    """
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def is_watched() -> bool:
    """Whether this thread's selections are watched."""
    return _watcher.get() is not None


def select_columns(
    scores: mx.array | Scores,
    index_topk: int,
    policy: SinkPolicy,
    left_padding: mx.array | None = None,
    mask: mx.array | None = None,
) -> mx.array | None:
    """Select ``index_topk`` columns for each query: the forced, then the best scored.

    A column that the mask hides is selected only where fewer than ``index_topk``
    columns are visible. NaN counts as the lowest score. In float32 an infinite score
    ties with the largest finite one. Of columns that tie any may be selected.

    Parameters
    ----------
    scores : mx.array or Scores, shape (B, 1, L, T)
        Float32, float16 or bfloat16, of any value, NaN and infinities included.
        ``Scores`` are computed here, one block of queries after the other.
    index_topk : int
        Number of columns to select.
    policy : SinkPolicy
        What must be selected; ``SinkPolicy(0, 0)`` leaves the choice to the scores.
    left_padding : mx.array, shape (B,), optional
        First real column of each sequence.
    mask : mx.array of bool, broadcastable to (B, 1, L, T), optional
        True where a query sees a column.

    Returns
    -------
    mx.array of uint32, shape (B, 1, L, index_topk), or None
        Distinct columns in no order; ``None`` (dense) where ``T <= index_topk``.

    Raises
    ------
    PolicyError
        ``policy.sinks >= index_topk``.
    """
    policy = policy.fit(index_topk)
    L, T = scores.shape[-2:]
    if T <= index_topk:
        return None
    if (watcher := _watcher.get()) is not None:
        scores = _shown(watcher, scores, left_padding, mask)
    select = functools.partial(_select, index_topk, policy, L, left_padding, mask)
    if isinstance(scores, mx.array):
        return select(slice(0, L), scores)
    return _by_blocks(scores, select)


def _shown(
    watcher: Watcher,
    scores: mx.array | Scores,
    left_padding: mx.array | None,
    mask: mx.array | None,
) -> mx.array:
    """All the scores, after the watcher has seen them."""
    if not isinstance(scores, mx.array):
        scores = _by_blocks(scores, lambda rows, block: block)
    watcher(scores, left_padding, mask)
    return scores


def _by_blocks(scores: Scores, act: Callable[[slice, mx.array], mx.array]) -> mx.array:
    """Call ``act`` with each block of queries; all results in one, (B, 1, L, any)."""

    def block(rows: slice) -> mx.array:
        return act(rows, scores.block(rows))

    return by_blocks(scores.shape[2], scores.rows, block, axis=2)


def _select(
    index_topk: int,
    policy: SinkPolicy,
    L: int,
    left_padding: mx.array | None,
    mask: mx.array | None,
    rows: slice,
    scores: mx.array,
) -> mx.array:
    """The selection of a block of the L queries."""
    T, sinks, recency = scores.shape[-1], policy.sinks, policy.recency
    if mask is None:
        keys = _ranked(scores)
    else:
        one_for_all = mask.ndim < 2 or mask.shape[-2] == 1
        mask = mask if one_for_all else mask[..., rows, :]
        keys = _ranked_and_hidden(scores, mx.broadcast_to(mask, scores.shape))
    if not (sinks or recency):
        pass
    elif L == 1 and left_padding is None and mask is None:
        # One query that sees everything: the first and last columns are forced.
        first, last = (mx.full((*keys.shape[:-1], n), mx.inf) for n in (sinks, recency))
        keys = mx.concatenate([first, keys[..., sinks : T - recency], last], axis=-1)
    else:
        columns, any_forced = columns_to_force(policy, L, T, left_padding, rows)
        columns = mx.broadcast_to(columns, (*keys.shape[:-1], columns.shape[-1]))
        own = mx.take_along_axis(keys, columns, axis=-1)
        keys = mx.put_along_axis(keys, columns, _forced(own, any_forced), axis=-1)
    selected = mx.argpartition(keys, kth=-index_topk, axis=-1)[..., -index_topk:]
    # A copy: a slice would keep the partition of all T columns in memory.
    return mx.contiguous(selected) if L > 1 else selected


# A sort key for each column: hidden -inf < any score, made finite < forced +inf. In
# float32 both half precisions' infinities, made finite, exceed their finite values.
# A shapeless function must not broadcast: MLX uses its first trace for all shapes.
@functools.partial(mx.compile, shapeless=True)
def _ranked(scores: mx.array) -> mx.array:
    return mx.nan_to_num(scores.astype(mx.float32), nan=-LARGEST)


@functools.partial(mx.compile, shapeless=True)
def _ranked_and_hidden(scores: mx.array, mask: mx.array) -> mx.array:
    keys = mx.nan_to_num(scores.astype(mx.float32), nan=-LARGEST)
    return mx.where(mask, keys, -mx.inf)


@mx.compile
def _forced(keys: mx.array, any_forced: mx.array) -> mx.array:
    """The sort keys of columns that the guarantee names; hidden ones stay hidden."""
    return mx.where(any_forced & (keys > -mx.inf), mx.inf, keys)
