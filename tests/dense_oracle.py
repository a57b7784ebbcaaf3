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
    w = weights(module)
    compressed = reference.compressed_queries(w, x)
    return reference.attention_weights(w, config, x, compressed, shown)


def index_scores(module, config, x):
    """(L, T) of the lightning indexer."""
    compressed = reference.compressed_queries(weights(module), x)
    return reference.index_scores(weights(module.indexer), config, x, compressed)
