"""The guarantee itself: which key columns a selection may not drop.

Columns are physical: places in the key buffer after the new keys were appended.
Query ``i`` of ``L`` stands at column ``T - L + i`` in every sequence of the batch,
and a sequence's first real column is its left padding.
"""

from __future__ import annotations

import mlx.core as mx

from .policy import SinkPolicy


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
        Counts of columns.
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
    first, position = _first(left_padding), _position(L, T)
    forced = _is_forced(policy, mx.arange(T), first, position)
    return forced if mask is None else forced & mask


def columns_to_force(
    policy: SinkPolicy,
    L: int,
    T: int,
    left_padding: mx.array | None = None,
    rows: slice = slice(None),
) -> tuple[mx.array, mx.array]:
    """The same few columns by their numbers, without a row of T for each query.

    Parameters
    ----------
    policy : SinkPolicy
        Counts of columns, at most T each.
    L, T, left_padding
        As for ``forced_columns``.
    rows : slice
        Queries to look at, of the L.

    Returns
    -------
    columns : mx.array of int, shape (B or 1, 1, rows, sinks + recency)
        Within the T columns. One can stand twice, where sinks and recency overlap or
        reach over an end of the buffer.
    forced : mx.array of bool, of the same shape
        Whether the guarantee holds for it, a mask left aside.
    """
    first, position = _first(left_padding), _position(L, T)[:, :, rows]
    sinks = first + mx.arange(policy.sinks)
    recent = position - mx.arange(policy.recency)
    shape = first.shape[0], 1, position.shape[2]
    columns = mx.concatenate(
        [mx.broadcast_to(part, (*shape, part.shape[-1])) for part in (sinks, recent)],
        axis=-1,
    )
    columns = mx.clip(columns, 0, T - 1)
    return columns, _is_forced(policy, columns, first, position)


def _first(left_padding: mx.array | None) -> mx.array:
    padding = mx.zeros(1, mx.int32) if left_padding is None else left_padding
    return padding.reshape(-1, 1, 1, 1)


def _position(L: int, T: int) -> mx.array:
    return mx.arange(T - L, T).reshape(1, 1, L, 1)


def _is_forced(
    policy: SinkPolicy, column: mx.array, first: mx.array, position: mx.array
) -> mx.array:
    """The guarantee, for any shapes that broadcast."""
    # The counts' bound keeps them within 32 bits; no column is that far off.
    sinks, recency = (min(n, 2**30) for n in (policy.sinks, policy.recency))
    kept = (column < first + sinks) | (column > position - recency)
    return kept & (column >= first) & (column <= position)
