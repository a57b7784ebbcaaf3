"""SnapKV with a floor of sinks: which rows of a prompt's cache are kept.

Source: Li et al. 2024, "SnapKV: LLM Knows What You are Looking for Before Generation".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..policy import check_room, recent_rows, whole_number

# Scores are compared by their bits. This is the least number above infinity's bits.
_ABOVE = 0x7F800001
_TOP = 0x7FFFFFFF


@dataclass(frozen=True)
class SnapKV:
    """The settings of SnapKV: what is kept of a prompt's keys and values.

    Parameters
    ----------
    budget : int
        Rows kept of each key-value head.
    sink_tokens : int, default=4
        Number of first tokens kept, before anything else.
    recent_tokens : int, optional
        Number of newest tokens kept, as far as the budget reaches after the sinks; by
        default an eighth of the budget, at least one.
    min_tokens : int, default=128
        A prompt of at most that many tokens is kept whole.
    guarantee_sinks : bool, default=True
        False caps the sinks at ``max(1, budget // 8)``, as earlier ports to MLX do.
    window_size : int, default=32
        Number of queries in the observation window: the prompt's last ones, whose
        attention scores the rows. The default is that of the paper's experiments.
    kernel_size : int, default=7
        Width of the max-pooling that keeps a row's neighbours with it. The default is
        that of the paper's experiments.

    Raises
    ------
    PolicyError
        A ``ValueError``: a count that is no whole number, or below its least.
    """

    budget: int
    sink_tokens: int = 4
    recent_tokens: int | None = None
    min_tokens: int = 128
    guarantee_sinks: bool = True
    window_size: int = 32
    kernel_size: int = 7

    def __post_init__(self):
        def check(name, least=0, of="tokens"):
            count = whole_number(name, getattr(self, name), least, of)
            object.__setattr__(self, name, count)

        check("budget", 1, "rows")
        check("window_size", 1, "queries")
        check("kernel_size", 1, "rows")
        if self.recent_tokens is None:
            object.__setattr__(self, "recent_tokens", recent_rows(self.budget))
        for name in ("sink_tokens", "recent_tokens", "min_tokens"):
            check(name)

    def check_room(self) -> SnapKV:
        """These settings, if a cache can be compacted by them.

        Raises
        ------
        PolicyError
            The budget has no room for the sinks, the recent rows and one scored row.
        """
        sinks = self.sink_tokens if self.guarantee_sinks else self.floor[0]
        check_room("budget", self.budget, sinks, self.recent_tokens)
        return self

    def covers(self, rows: int, tokens: int | None = None) -> bool:
        """Whether all rows are kept.

        Parameters
        ----------
        rows : int
            Number of rows held.
        tokens : int, optional
            Number of tokens seen, dropped ones included; by default ``rows``.
        """
        tokens = rows if tokens is None else tokens
        return rows <= self.budget or tokens <= self.min_tokens

    @property
    def floor(self) -> tuple[int, int]:
        """How many sinks, and how many recent rows, are kept whatever the scores."""
        sinks = self.sink_tokens
        if not self.guarantee_sinks:
            sinks = min(sinks, max(1, self.budget // 8))
        sinks = min(sinks, self.budget)
        return sinks, min(self.recent_tokens, self.budget - sinks)

    def columns(self, scores: mx.array) -> mx.array:
        """``snapkv_keep_columns`` with these settings."""
        return snapkv_keep_columns(
            scores,
            self.budget,
            sink_tokens=self.sink_tokens,
            recent_tokens=self.recent_tokens,
            guarantee_sinks=self.guarantee_sinks,
        )


def snapkv_keep_indices(
    seq_len: int,
    budget: int,
    scores: Any,
    *,
    sink_tokens: int = 4,
    recent_tokens: int | None = None,
    min_tokens: int = 128,
    guarantee_sinks: bool = True,
) -> tuple[int, ...]:
    """The rows of one sequence that a budget keeps: sinks, then recent, then the best.

    No score displaces a sink or a recent row: NaN counts as the least, and of equal
    scores the later row is kept.

    Parameters
    ----------
    seq_len : int
        Rows of the sequence.
    budget : int
        Rows to keep.
    scores : sequence of float, np.ndarray or mx.array, shape (>= seq_len,)
        Scores of the rows; those of sinks and recent rows aren't looked at.
    sink_tokens, recent_tokens, min_tokens, guarantee_sinks
        See ``SnapKV``.

    Returns
    -------
    tuple of int
        Sorted; ``min(budget, seq_len)`` of them, or all rows where ``seq_len`` is at
        most ``min_tokens``.

    Raises
    ------
    ValueError
        A negative ``seq_len``, ``budget <= 0`` or another impossible count; scores that
        are too few, or not one dimension of numbers.
    """
    method = SnapKV(budget, sink_tokens, recent_tokens, min_tokens, guarantee_sinks)
    T = whole_number("seq_len", seq_len, of="rows")
    scores = _row_of_scores(scores)
    if len(scores) < T:
        raise ValueError(f"{len(scores)} scores are too few for seq_len={T}")
    if method.covers(T):
        return tuple(range(T))
    sinks, recent = method.floor
    first, last = sinks, T - recent
    middle = scores[first:last]
    middle = np.where(np.isnan(middle), -np.inf, middle)
    kept = np.zeros(T, bool)
    kept[:first] = kept[last:] = True
    if free := method.budget - sinks - recent:
        threshold = np.partition(middle, -free)[-free]
        kept[first:last] = middle > threshold
        tied = np.flatnonzero(middle == threshold) + first
        kept[tied[len(tied) - (method.budget - kept.sum()) :]] = True
    return tuple(np.flatnonzero(kept).tolist())


def _row_of_scores(scores: Any) -> np.ndarray:
    if isinstance(scores, mx.array):
        # NumPy has no bfloat16.
        scores = scores.astype(mx.float32)
    try:
        row = np.asarray(scores, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"scores must be numbers: {error}") from None
    if row.ndim != 1:
        raise ValueError(f"scores must have one dimension, not the shape {row.shape}")
    return row


def snapkv_keep_columns(
    scores: mx.array,
    budget: int,
    *,
    sink_tokens: int = 4,
    recent_tokens: int | None = None,
    left_padding: mx.array | None = None,
    guarantee_sinks: bool = True,
) -> mx.array:
    """``snapkv_keep_indices`` for each head of a batch, without a synchronisation.

    Parameters
    ----------
    scores : mx.array, shape (B, H, T)
        Scores of the columns; they are compared in float32.
    budget : int
        Rows to keep.
    sink_tokens, recent_tokens, guarantee_sinks
        See ``SnapKV``. A sequence's sinks begin after its padding.
    left_padding : mx.array of int, shape (B,), optional
        Columns before each sequence's first token. They are kept only where a sequence
        is shorter than the budget. Then they come first, and there are
        ``max(0, left_padding - T + k)`` of them.

    Returns
    -------
    mx.array of int32, shape (B, H, k)
        Sorted; ``k = min(budget, T)``.

    Raises
    ------
    ValueError
        An impossible count, or scores of another shape.
    """
    method = SnapKV(budget, sink_tokens, recent_tokens, 0, guarantee_sinks)
    if scores.ndim != 3:
        raise ValueError(f"scores must have the shape (B, H, T), not {scores.shape}")
    T = scores.shape[-1]
    column = mx.arange(T, dtype=mx.int32)
    if method.covers(T):
        return mx.broadcast_to(column, scores.shape)
    sinks, recent = method.floor
    # Each score becomes a whole number, its sort key, in the same order. Sinks and
    # recent columns get higher ones, so that one threshold decides everything. Adding
    # 0.0 turns -0.0 into 0.0, so that the two tie.
    bits = (scores.astype(mx.float32) + 0.0).view(mx.int32)
    key = mx.where(bits < 0, bits ^ _TOP, bits)
    least = -_ABOVE  # minus infinity's sort key
    key = mx.where(mx.isnan(scores), least, key)
    position = column
    if left_padding is not None:
        position = column - left_padding.astype(mx.int32).reshape(-1, 1, 1)
    # In a short sequence a column may be sink and recent: either sort key will do.
    key = mx.where(column >= T - recent, _ABOVE + column - (T - recent), key)
    key = mx.where((position >= 0) & (position < sinks), _TOP - position, key)
    key = mx.where(position < 0, least - 1, key)
    k = method.budget
    threshold = mx.partition(key, T - k, axis=-1)[..., T - k : T - k + 1]
    above, tied = key > threshold, key == threshold
    missing = k - above.sum(axis=-1, keepdims=True)
    later_ties = mx.cumsum(tied.astype(mx.int32), axis=-1, reverse=True)
    kept = above | (tied & (later_ties <= missing))
    # A kept column is written to the entry of its rank; all others to one that is cut.
    rank = mx.where(kept, mx.cumsum(kept.astype(mx.int32), axis=-1) - 1, k)
    slots = mx.zeros((*scores.shape[:2], k + 1), mx.int32)
    columns = mx.broadcast_to(column, scores.shape)
    return mx.put_along_axis(slots, rank, columns, axis=-1)[..., :k]


def window_scores(
    queries: mx.array,
    keys: mx.array,
    scale: float,
    kernel_size: int = 7,
    sinks: mx.array | None = None,
) -> mx.array:
    """Scores of the rows: the observation window's attention, pooled over neighbours.

    Parameters
    ----------
    queries : mx.array, shape (1, H, W, D)
        Queries of the last W tokens; query i sees the rows up to ``T - W + i``.
    keys : mx.array, shape (1, heads, T, D)
        ``H`` is a multiple of ``heads``. The query heads of a key head are averaged.
    scale : float
        What the attention multiplies its logits by.
    kernel_size : int, default=7
        Width of the max-pooling.
    sinks : mx.array, shape (H,), optional
        The model's learned logits, not the sink tokens: they take a share of the
        attention and have no row.

    Returns
    -------
    mx.array of float32, shape (1, heads, T)
    """
    _, H, W, D = queries.shape
    heads, T = keys.shape[1:3]
    queries = queries.astype(mx.float32).reshape(1, heads, H // heads, W, D) * scale
    logits = queries @ keys.astype(mx.float32)[:, :, None].swapaxes(-1, -2)
    visible = mx.arange(T) <= mx.arange(T - W, T)[:, None]
    logits = mx.where(visible, logits, -mx.inf)
    if sinks is not None:
        extra = sinks.astype(mx.float32).reshape(1, heads, -1, 1, 1)
        extra = mx.broadcast_to(extra, (*logits.shape[:-1], 1))
        logits = mx.concatenate([logits, extra], axis=-1)
    weights = mx.softmax(logits, axis=-1)[..., :T]
    scores = weights.sum(axis=-2).mean(axis=2)
    before = (kernel_size - 1) // 2
    widened = mx.pad(scores, [(0, 0), (0, 0), (before, kernel_size - 1 - before)])
    neighbours = [widened[..., i : i + T] for i in range(kernel_size)]
    return mx.stack(neighbours).max(axis=0)
