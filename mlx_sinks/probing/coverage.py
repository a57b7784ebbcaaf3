"""What a selection of columns covers: counted, and weighed by dense attention."""

from __future__ import annotations

import mlx.core as mx

from ..policy import SinkPolicy
from ..sparse.columns import forced_columns
from ..sparse.selection import select_columns

METRICS = (
    "sinks_kept",
    "recency_kept",
    "mass",
    "mass_guaranteed",
    "mass_best",
    "mass_chance",
)


def row_coverage(
    scores: mx.array,
    attention: mx.array,
    index_topk: int,
    policy: SinkPolicy,
    left_padding: mx.array | None = None,
    mask: mx.array | None = None,
) -> mx.array:
    """What one query's selection covers, with and without the guarantee.

    Parameters
    ----------
    scores : mx.array, shape (1, 1, 1, T)
        The indexer's scores for a query at the last column.
    attention : mx.array, shape (H, T)
        The query's dense attention; in each head it sums to 1.
    index_topk : int
        Number of columns to select, below ``T``.
    policy : SinkPolicy
        What counts as a sink and as recent, and what the guarantee would keep.
    left_padding : mx.array, shape (1,), optional
        First real column.
    mask : mx.array of bool, shape (1, 1, 1, T), optional
        True where the query sees a column.

    Returns
    -------
    mx.array of float32, shape (6,)
        ``METRICS``. The first two are the shares of the sinks and of the recency
        window, as they fit in ``index_topk``, that the selection by scores alone keeps;
        NaN where there are none to keep. The others are shares of dense attention,
        averaged over heads: on that selection; on the one with the guarantee; on the
        ``index_topk`` columns with the most attention, which is the most possible; and,
        on average, on as many visible columns picked blindly.
    """
    T = scores.shape[-1]
    attention = attention.astype(mx.float32).mean(axis=0).reshape(1, 1, 1, T)

    def select(by: mx.array, policy: SinkPolicy) -> mx.array:
        columns = select_columns(by, index_topk, policy, left_padding, mask)
        chosen = mx.zeros((1, 1, 1, T), mx.bool_)
        return mx.put_along_axis(chosen, columns, mx.array(True), axis=-1)

    def share_of(wanted: SinkPolicy) -> mx.array:
        forced = forced_columns(wanted, 1, T, left_padding, mask)
        return (unforced & forced).sum() / forced.sum()

    nothing = SinkPolicy(0, 0)
    visible = forced_columns(SinkPolicy(0, T), 1, T, left_padding, mask)
    unforced = select(scores, nothing)
    fitted = policy.fit(index_topk)
    return mx.stack(
        [
            share_of(SinkPolicy(fitted.sinks, 0)),
            share_of(SinkPolicy(0, fitted.recency)),
            (attention * unforced).sum(),
            (attention * select(scores, fitted)).sum(),
            (attention * select(attention, nothing)).sum(),
            mx.minimum(1, index_topk / visible.sum()),
        ]
    )
