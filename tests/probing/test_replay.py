"""A layer's dense attention, computed again by the layer's own code."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import deepseek_v32
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import make_prompt_cache

import dense_oracle
import small_models
from mlx_sinks.probing.replay import dense_attention

STATES = mx.random.normal((30, 64), key=mx.random.key(1))


def filled_cache(model, mask):
    cache, L = make_prompt_cache(model)[0], len(STATES)
    mx.eval(model.layers[0].self_attn(STATES[None], mask, cache))
    return cache[0].keys[..., :L, :], cache[0].values[..., :L, :]


@pytest.mark.parametrize("queries", [[29], [3, 17, 8, 29], list(range(30))])
@pytest.mark.parametrize("kind", small_models.KINDS)
def test_dense_attention_is_the_layers_own_arithmetic(kind, queries):
    model = small_models.make(kind, seed=3)
    attention = model.layers[0].self_attn
    shown = np.array(create_causal_mask(30))
    shown[:, 5] = False
    shown[5, 5] = True
    expected = dense_oracle.attention(
        attention, dense_oracle.facts(model), np.array(STATES, np.float64), shown
    )
    mask, rows = mx.array(shown), mx.array(queries)
    kept = filled_cache(model, mask)
    weights = dense_attention(
        type(attention).__call__, attention, STATES[rows], mask[rows], rows, *kept
    )
    assert weights.shape == (len(queries), 4, 30)
    assert weights.dtype == mx.float32
    weights = np.array(weights)
    np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-5)
    np.testing.assert_allclose(weights, expected.swapaxes(0, 1)[queries], atol=1e-5)


def test_dense_attention_touches_nothing():
    model, mask = small_models.make(seed=3), create_causal_mask(30)
    attention = model.layers[0].self_attn
    kept = filled_cache(model, mask)
    before = [np.array(array) for array in kept]
    module = dict(attention), type(attention), dict(vars(attention))
    kernel = deepseek_v32.scaled_dot_product_attention
    forward = type(attention).__call__
    rows = mx.array([28, 29])
    dense_attention(forward, attention, STATES[-2:], mask[-2:], rows, *kept)
    assert (dict(attention), type(attention), dict(vars(attention))) == module
    assert deepseek_v32.scaled_dot_product_attention is kernel
    for array, copy in zip(kept, before):
        np.testing.assert_array_equal(np.array(array), copy)
