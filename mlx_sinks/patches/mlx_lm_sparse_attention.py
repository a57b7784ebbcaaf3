"""Target ``sparse_attention``: steps of several tokens attend to what was selected.

Upstream file: ``mlx_lm/models/deepseek_v32.py``. Past ``index_topk`` keys its attention
turns the selection of a step of several tokens into a mask, and expands, multiplies and
hides all keys. ``glm_moe_dsa`` has the same class.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..policy import SinkPolicy
from ..sparse.attention import (
    UPSTREAM,
    WAYS,
    Shape,
    best_way,
    keys_after,
    sparse_forward,
)
from ..sparse.blocks import block_memory
from .patch import Patch, Site, empty_cache, random_state_kept, upstream_of


class SparseAttentionPatch(Patch):
    """Replaces the attention of steps of several tokens past ``index_topk``."""

    def sites(self, module: ModuleType) -> list[Site]:
        return [Site(module.DeepseekV32Attention, "__call__", self._forward)]

    def _forward(self, policy, upstream, attention, x, mask=None, cache=None):
        L, T = x.shape[1], keys_after(cache, x.shape[1])
        index_topk = getattr(attention.indexer, "index_topk", None)
        known = None not in (T, index_topk)
        if L == 1 or attention.training or not known or T <= index_topk:
            return upstream(attention, x, mask, cache)
        way = best_way(Shape.of(attention), index_topk, L, T, policy.sparse_from)
        if way == UPSTREAM:
            return upstream(attention, x, mask, cache)
        return sparse_forward(
            upstream, attention, x, mask, cache, way, block_memory(policy)
        )

    def policy_for(self, attention: nn.Module, *_: Any) -> SinkPolicy | None:
        """A model's own policy is that of its indexers."""
        if self._policy is None:
            return None
        indexer = getattr(attention, "indexer", None)
        return getattr(indexer, "sink_policy", None) or self._policy

    def keeps(self, policy: SinkPolicy) -> str:
        return "steps of several tokens to the keys that were selected"

    def runs_wrongly(self, module: ModuleType) -> bool:
        """No: upstream's attention has the same result, and takes longer."""
        return False

    def self_check(self, module: ModuleType) -> str | None:
        with random_state_kept():
            attention = _small_attention(module)
        upstream = upstream_of(self.sites(module)[0].found)
        for left_padding, steps in _CASES:
            expected = _outputs(
                module, functools.partial(upstream, attention), left_padding, steps
            )
            for way in WAYS[1:]:
                forward = functools.partial(
                    sparse_forward, upstream, attention, way=way, memory=1
                )
                ours = _outputs(module, forward, left_padding, steps)
                if not mx.allclose(ours, expected, rtol=1e-3, atol=1e-4).item():
                    return f"{way} attention differs from upstream's after {steps}"
        return None

    def faults(self, module: ModuleType) -> list[str]:
        """A key that no query selected spoils what looks at it: it isn't a number."""
        with random_state_kept():
            attention = _small_attention(module)
        attention.indexer = _FirstOnes(attention.indexer.index_topk)
        x = mx.random.normal((1, 12, 32), key=mx.random.key(0))
        x[:, -1] = mx.nan
        mask = mx.tri(12, 12, 0, dtype=mx.bool_)
        seen = mx.isnan(attention(x, mask)[:, 6:-1]).any()
        return ["a step of several tokens attends to keys that it hides"] * seen.item()


class _FirstOnes:
    """Selects the first columns, whatever the scores."""

    sink_policy = SinkPolicy(sparse_from=1)

    def __init__(self, index_topk: int):
        self.index_topk = index_topk

    def __call__(self, x, qr, mask, cache=None):
        columns = mx.arange(self.index_topk, dtype=mx.uint32)
        return mx.broadcast_to(columns, (x.shape[0], 1, x.shape[1], self.index_topk))


# How the self-check calls a layer: left padding by sequence, tokens by call.
_CASES = ((None, (12,)), (None, (9, 4)), ((4, 0), (9, 3)))


def _small_attention(module: ModuleType) -> nn.Module:
    args = module.ModelArgs(
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        index_n_heads=4,
        index_head_dim=16,
        index_topk=6,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    attention = module.DeepseekV32Attention(args)
    attention.indexer.sink_policy = SinkPolicy(0, 0)  # whatever is in force
    attention.eval()
    return attention


def _outputs(module: ModuleType, forward, left_padding, steps) -> mx.array:
    """What each step returns of real queries, all in one row."""
    B = len(left_padding or (0,))
    cache = [empty_cache(module, left_padding) for _ in range(2)]
    results, seen = [], 0
    for number, L in enumerate(steps):
        x = mx.random.normal((B, L, 32), key=mx.random.key(number))
        mask = module.create_attention_mask(x, cache[0], return_array=True)
        output = forward(x, mask=mask, cache=cache)
        for row, padding in enumerate(left_padding or (0,)):
            results.append(output[row, max(0, padding - seen) :].flatten())
        seen += L
    return mx.concatenate(results)
