"""SmolLM2 with DeepSeek Sparse Attention: mlx-lm's llama, upstream's Indexer added.

This file travels in the model folder (``model_file`` in its ``config.json``) and is
run by mlx-lm with ``--trust-remote-code``. Attention treats the indexer's columns as
``mlx_lm/models/deepseek_v32.py`` does: gathered for one query, a mask for several.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import deepseek_v32, llama
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import CacheList, KVCache


@dataclass
class ModelArgs(llama.ModelArgs):
    index_n_heads: int = 4
    index_head_dim: int = 32
    index_topk: int = 256
    index_rope_head_dim: int = 16
    index_rope_interleave: bool = False

    def indexer(self) -> deepseek_v32.Indexer:
        """Upstream's Indexer, random; its queries come from the hidden state."""
        args = deepseek_v32.ModelArgs(
            hidden_size=self.hidden_size,
            q_lora_rank=self.hidden_size,
            index_n_heads=self.index_n_heads,
            index_head_dim=self.index_head_dim,
            index_topk=self.index_topk,
            qk_rope_head_dim=self.index_rope_head_dim,
        )
        indexer = deepseek_v32.Indexer(args)
        # mlx-lm 0.31.3 interleaves always: weights trained for one convention would
        # be run with the other.
        indexer.rope = nn.RoPE(
            self.index_rope_head_dim,
            traditional=self.index_rope_interleave,
            base=self.rope_theta,
        )
        return indexer


class SparseAttention(llama.Attention):
    def __init__(self, args: ModelArgs):
        super().__init__(args)
        self.indexer = args.indexer()

    def __call__(
        self, x: mx.array, mask: mx.array | None = None, cache: Any | None = None
    ) -> mx.array:
        B, L, _ = x.shape
        queries = self.q_proj(x).reshape(B, L, self.n_heads, -1).swapaxes(1, 2)
        keys = self.k_proj(x).reshape(B, L, self.n_kv_heads, -1).swapaxes(1, 2)
        values = self.v_proj(x).reshape(B, L, self.n_kv_heads, -1).swapaxes(1, 2)

        kv_cache, index_cache = (None, None) if cache is None else cache
        offset = 0 if kv_cache is None else kv_cache.offset
        queries = self.rope(queries, offset=offset)
        keys = self.rope(keys, offset=offset)
        if kv_cache is not None:
            keys, values = kv_cache.update_and_fetch(keys, values)

        columns = self.indexer(x, x, mask, cache=index_cache)
        if columns is not None and L == 1:
            rows = columns[:, :, 0, :, None]
            keys = mx.take_along_axis(keys, rows, axis=2)
            values = mx.take_along_axis(values, rows, axis=2)
            if mask is not None:
                mask = mx.take_along_axis(mask, columns, axis=-1)
        elif columns is not None:
            selected = mx.zeros((B, 1, L, keys.shape[2]), mx.bool_)
            selected = mx.put_along_axis(selected, columns, mx.array(True), axis=-1)
            mask = selected if mask is None else selected & mask
        if kv_cache is not None:
            # While all columns fit nobody reads the indexer's cache, and its graph
            # would grow with every step.
            kv_cache.keys = mx.depends(
                kv_cache.keys, (index_cache.keys, index_cache.values)
            )

        output = scaled_dot_product_attention(
            queries, keys, values, cache=None, scale=self.scale, mask=mask
        )
        return self.o_proj(output.swapaxes(1, 2).reshape(B, L, -1))


class SparseLlamaModel(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [
            llama.TransformerBlock(args) for _ in range(args.num_hidden_layers)
        ]
        for layer in self.layers:
            layer.self_attn = SparseAttention(args)
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(self, inputs: mx.array, cache: Any | None = None) -> mx.array:
        h = self.embed_tokens(inputs)
        cache = [None] * len(self.layers) if cache is None else cache
        mask = create_attention_mask(
            h, cache[0][0] if cache[0] else None, return_array=True
        )
        for layer, layer_cache in zip(self.layers, cache):
            h = layer(h, mask, layer_cache)
        return self.norm(h)


class Model(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.model = SparseLlamaModel(args)

    def __call__(self, inputs: mx.array, cache: Any | None = None) -> mx.array:
        return self.model.embed_tokens.as_linear(self.model(inputs, cache))

    @property
    def layers(self):
        return self.model.layers

    def make_cache(self):
        return [CacheList(KVCache(), KVCache()) for _ in self.layers]
