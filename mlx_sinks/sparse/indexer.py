"""DSA's indexer with the guarantee: project, score, select.

Up to the scores it follows ``Indexer`` in ``mlx_lm/models/deepseek_v32.py``, the
lightning indexer of the DeepSeek-V3.2 report. The selection is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..policy import SinkPolicy
from .blocks import block_memory
from .scoring import IndexScores
from .selection import select_columns


@dataclass(frozen=True)
class Dialect:
    """Where the supported mlx-lm releases differ inside the same forward.

    Parameters
    ----------
    append_keys : callable
        ``(cache, keys) -> keys``: writes (B, 1, L, D) keys to the indexer's cache as
        this release does and returns all T of them.
    sum_heads : callable
        ``(B, H, L, T) scores -> (B, 1, L, T)``. In half precision the order of the sum
        decides picks near the threshold, so it has to be this release's.
    """

    append_keys: Callable[[Any, mx.array], mx.array]
    sum_heads: Callable[[mx.array], mx.array]


def indexer_forward(
    indexer: nn.Module,
    x: mx.array,
    qr: mx.array,
    mask: mx.array | None,
    cache: Any | None,
    *,
    policy: SinkPolicy,
    dialect: Dialect,
) -> mx.array | None:
    """What upstream's ``Indexer.__call__`` returns, with the guarantee.

    ``policy.scoring`` says how the scores are computed.

    Parameters
    ----------
    indexer : mlx_lm.models.deepseek_v32.Indexer
        Its layers, rotary embedding and ``index_topk`` are used as they are.
    x, qr : mx.array, shapes (B, L, hidden_size) and (B, L, q_lora_rank)
        Hidden states, and the compressed queries of the attention layer.
    mask : mx.array of bool, shape (L, T) or (B, 1, L, T), optional
        True where a query sees a column.
    cache : optional
        ``None``, ``KVCache`` or ``BatchKVCache``. Its ``left_padding``, where it has
        one, is each sequence's first real column.

    Returns
    -------
    mx.array, shape (B, 1, L, index_topk), or None
        Selected columns; ``None`` (dense) while all columns fit.
    """
    B, L, _ = x.shape
    queries = indexer.wq_b(qr).reshape(B, L, indexer.n_heads, indexer.head_dim)
    keys = indexer.k_norm(indexer.wk(x)).reshape(B, 1, L, indexer.head_dim)
    offset = 0 if cache is None else cache.offset
    queries = indexer.rope(queries.swapaxes(1, 2), offset=offset)
    keys = indexer.rope(keys, offset=offset)
    if cache is not None:
        keys = dialect.append_keys(cache, keys)

    # Even where all fits: an impossible policy must not wait for a long context.
    policy.fit(indexer.index_topk)
    if keys.shape[2] <= indexer.index_topk:
        return None

    weights = indexer.weights_proj(x)
    scale = indexer.n_heads**-0.5 * indexer.softmax_scale
    if policy.scoring == "upstream":
        weights = (weights * scale).swapaxes(-1, -2)[..., None]
        products = mx.maximum(queries @ keys.swapaxes(-1, -2), 0)
        scores = dialect.sum_heads(products * weights)
    else:
        weights = weights.astype(mx.float32) * scale
        scores = IndexScores(queries, keys, weights, block_memory(policy))
    return select_columns(
        scores,
        indexer.index_topk,
        policy,
        left_padding=getattr(cache, "left_padding", None),
        mask=mask,
    )
