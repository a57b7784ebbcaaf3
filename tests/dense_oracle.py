"""A DSA layer's dense attention and index scores, in NumPy float64."""

import numpy as np
from mlx.utils import tree_flatten

import reference


def facts(model):
    """A model's configuration; older releases interleave the indexer's RoPE always."""
    return {"indexer_rope_interleave": True, **vars(model.args)}


def weights(module):
    return {name: np.array(value) for name, value in tree_flatten(module.parameters())}


def attention(module, config, x, shown):
    """(H, L, T) weights of every token of one sequence, from hidden states (L, D)."""
    w, L, H = weights(module), len(x), config["num_attention_heads"]
    nope, rank = config["qk_nope_head_dim"], config["kv_lora_rank"]
    compressed = reference.compressed_queries(w, x)
    queries = reference.linear(w, "q_b_proj", compressed).reshape(L, H, -1)
    compressed = reference.linear(w, "kv_a_proj_with_mqa", x)
    norm = w["kv_a_layernorm.weight"]
    latent = reference.rms_norm(compressed[:, :rank], norm, reference.INNER_EPS)
    key_pe = reference.rope(compressed[:, rank:], config, interleaved=True)
    scores = np.zeros((H, L, L))
    for h in range(H):
        query_pe = reference.rope(queries[:, h, nope:], config, interleaved=True)
        scores[h] = queries[:, h, :nope] @ (latent @ w["embed_q.weight"][h]).T
        scores[h] += query_pe @ key_pe.T
    scores = np.where(shown, scores * queries.shape[-1] ** -0.5, -np.inf)
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return scores / scores.sum(axis=-1, keepdims=True)


def index_scores(module, config, x):
    """(L, T) of the lightning indexer."""
    compressed = reference.compressed_queries(weights(module), x)
    return reference.index_scores(weights(module.indexer), config, x, compressed)
