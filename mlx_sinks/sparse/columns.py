"""The guarantee itself: which key columns a selection may not drop.

A column is a position in the key buffer after the new keys were appended. Query ``i``
of ``L`` is at column ``T - L + i`` in every sequence of the batch. A sequence's left
padding is its first real column.
"""

from __future__ import annotations

import functools

import mlx.core as mx

from ..policy import SinkPolicy


def forced_columns(
    policy: SinkPolicy,
    L: int,
    T: int,
    left_padding: mx.array | None = None,
    mask: mx.array | None = None,
) -> mx.array:
    """The sinks and the recency window that each query sees.

    Parameters
    ----------
    policy : SinkPolicy
        Its ``recency`` is a number, as ``fit`` returns it.
    L, T : int
        Numbers of new queries, and of keys in the buffer with the new ones appended.
    left_padding : mx.array, shape (B,), optional
        First real column of each sequence; 0 where omitted.
    mask : mx.array of bool, broadcastable to (B, 1, L, T), optional
        True where a query sees a column. A hidden column is never forced.

    Returns
    -------
    mx.array of bool, shape (B or 1, 1, L, T)
        True at ``sinks | recency``, at most ``sinks + recency`` columns of each query.
    """
    sinks, recency = min(policy.sinks, T), min(policy.recency, T)
    column, first, position = mx.arange(T), _first(left_padding), _position(L, T)
    kept = (column < first + sinks) | (column > position - recency)
    forced = kept & (column >= first) & (column <= position)
    return forced if mask is None else forced & mask


def columns_to_force(
    policy: SinkPolicy,
    L: int,
    T: int,
    left_padding: mx.array | None = None,
    rows: slice = slice(None),
) -> tuple[mx.array, mx.array]:
    """The forced columns as numbers: a few for each query instead of a mask over T.

    Parameters
    ----------
    policy : SinkPolicy
        Its ``recency`` is a number; sinks and recency are at most T together.
    L, T, left_padding
        As for ``forced_columns``.
    rows : slice
        Which of the L queries to look at.

    Returns
    -------
    columns : mx.array of int, shape (B or 1, 1, rows, sinks + recency)
        Each query's sinks and recency window, whatever a mask hides. A column is there
        twice where the two overlap. A query in the padding has only its own column.
    any_forced : mx.array of bool, shape (B or 1, 1, rows, 1)
        False for a query in the padding.
    """
    position = _position(L, T, rows)
    return _placed(*_steps(policy), _first(left_padding), position)


@functools.lru_cache(maxsize=256)
def _steps(policy: SinkPolicy) -> tuple[mx.array, mx.array]:
    """For each forced column: whether it is counted from the query, and its distance.

    A recent column is counted backwards from the query, a sink forwards from the
    sequence's first column.
    """
    back = [False] * policy.sinks + [True] * policy.recency
    steps = [*range(policy.sinks), *range(0, -policy.recency, -1)]
    return mx.array(back), mx.array(steps)


@mx.compile
def _placed(
    back: mx.array, steps: mx.array, first: mx.array, position: mx.array
) -> tuple[mx.array, mx.array]:
    # A short sequence has fewer columns than the policy names. Sinks past the query and
    # recent columns before the first one are clipped; both ends are forced anyway.
    columns = mx.clip(mx.where(back, position, first) + steps, first, position)
    return mx.maximum(columns, 0), first <= position


def _first(left_padding: mx.array | None) -> mx.array:
    padding = mx.zeros(1, mx.int32) if left_padding is None else left_padding
    return padding.reshape(-1, 1, 1, 1)


def _position(L: int, T: int, rows: slice = slice(None)) -> mx.array:
    columns = range(T - L, T)[rows]
    if len(columns) == 1:  # in decode a constant saves an operation
        return mx.array(columns[0]).reshape(1, 1, 1, 1)
    return mx.arange(columns.start, columns.stop).reshape(1, 1, -1, 1)
