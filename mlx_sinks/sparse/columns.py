"""The guarantee itself: which key columns a selection may not drop.

Columns are physical: they count the key buffer after the new keys were appended.
Query ``i`` of ``L`` stands at column ``T - L + i`` in every sequence of the batch,
and a sequence's first real column is its left padding.
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
        Counts of columns, as ``fit`` returns them.
    L, T : int
        New queries, and keys in the buffer with the new ones appended.
    left_padding : mx.array, shape (B,), optional
        First real column of each sequence; 0 where omitted.
    mask : mx.array of bool, broadcastable to (B, 1, L, T), optional
        True where a query sees a column. A hidden column is never forced.

    Returns
    -------
    mx.array of bool, shape (B or 1, 1, L, T)
        True at ``sinks | recency``, at most ``policy.sinks + policy.recency`` a row.
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
        Counts of columns, as ``fit`` returns them, at most T together.
    L, T, left_padding
        As for ``forced_columns``.
    rows : slice
        Queries to look at, of the L.

    Returns
    -------
    columns : mx.array of int, shape (B or 1, 1, rows, sinks + recency)
        The query's sinks and recency window, whatever the mask hides. A column stands
        twice where the two overlap. A query in the padding has its own column only.
    any_forced : mx.array of bool, shape (B or 1, 1, rows, 1)
        False for a query in the padding.
    """
    position = _position(L, T, rows)
    return _placed(*_steps(policy), _first(left_padding), position)


@functools.lru_cache(maxsize=256)
def _steps(policy: SinkPolicy) -> tuple[mx.array, mx.array]:
    """For each forced column: True where it is counted back from the query; how far.

    A sink is counted forwards from the sequence's first column.
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
    if len(columns) == 1:  # without an operation of its own, for decoding
        return mx.array(columns[0]).reshape(1, 1, 1, 1)
    return mx.arange(columns.start, columns.stop).reshape(1, 1, -1, 1)
