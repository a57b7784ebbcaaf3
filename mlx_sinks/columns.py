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
    sinks, recency = min(policy.sinks, T), min(policy.recency, T)
    column = mx.arange(T).reshape(1, 1, 1, T)
    position = mx.arange(T - L, T).reshape(1, 1, L, 1)
    first = mx.zeros(1, mx.int32) if left_padding is None else left_padding
    first = first.reshape(-1, 1, 1, 1)
    kept = (column < first + sinks) | (column > position - recency)
    forced = kept & (column >= first) & (column <= position)
    return forced if mask is None else forced & mask
