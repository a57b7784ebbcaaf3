"""From scores to selected columns, with the guarantee. All of the top-k is here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import mlx.core as mx

from .columns import forced_columns
from .policy import SinkPolicy

Listener = Callable[[mx.array, mx.array | None, mx.array | None], object]
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Show a listener what each selection inside the block chooses from.

    It is called with ``scores``, ``left_padding`` and ``mask`` as ``select_columns``
    got them, before the choice and only where there is one (``T > index_topk``). The
    block is the thread's own: selections of other threads are not heard.
    """
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def is_heard() -> bool:
    """Whether a listener waits for this thread's selections."""
    return _listener.get() is not None


def select_columns(
    scores: mx.array,
    index_topk: int,
    policy: SinkPolicy,
    left_padding: mx.array | None = None,
    mask: mx.array | None = None,
) -> mx.array | None:
    """Select ``index_topk`` columns a query: the forced ones, then the best scores.

    A column that the mask hides fills a slot only where fewer than ``index_topk``
    columns are visible. NaN counts as the lowest score. In float32 an infinite score
    ties with the largest finite one; ties are broken either way.

    Parameters
    ----------
    scores : mx.array, shape (B, 1, L, T)
        Float32, float16 or bfloat16. Any value, NaN and infinities included.
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
    if (listener := _listener.get()) is not None:
        listener(scores, left_padding, mask)
    # Three classes in one key: hidden -inf < any score, made finite < forced +inf.
    # Float32 holds the infinities of both half precisions apart from their finite
    # values.
    keys = mx.nan_to_num(scores.astype(mx.float32), nan=mx.finfo(mx.float32).min)
    if mask is not None:
        keys = mx.where(mask, keys, -mx.inf)
    if policy.sinks or policy.recency:
        forced = forced_columns(policy, L, T, left_padding, mask)
        keys = mx.where(forced, mx.inf, keys)
    return mx.argpartition(keys, kth=-index_topk, axis=-1)[..., -index_topk:]
