"""Which layers of which models get a window, and which positions can be moved."""

import mlx.core as mx
import pytest

import mlx_sinks
import small_models


def decoded(model, cache, tokens=40):
    for token in range(tokens):
        mx.eval(model(mx.array([[token]]), cache=cache))
    return cache


def test_latent_attention_keeps_absolute_positions_only():
    """Its rotated part is stored among the values, where a move would miss it."""
    model = small_models.make("deepseek_v3")
    cache = decoded(model, mlx_sinks.make_sink_cache(model, 20))
    assert [layer.evictions for layer in cache] == [20, 20]
    with pytest.raises(ValueError, match="'local' can't move .* layer 0 .*RoPE"):
        mlx_sinks.make_sink_cache(model, 20, position_mode="local")


def test_layers_without_positions_are_never_rotated():
    facts = dict(num_key_value_heads=2, no_rope_layers=[1, 0])
    model = small_models.make("smollm3", **facts)
    cache = decoded(model, mlx_sinks.make_sink_cache(model, 20, position_mode="local"))
    assert [layer.rotations for layer in cache] == [20 * 4, 0]


def test_learned_positions_cannot_be_moved():
    model = small_models.make(
        "gpt2",
        n_ctx=2048,
        n_embd=32,
        n_head=2,
        n_layer=1,
        n_positions=2048,
        layer_norm_epsilon=1e-5,
    )
    assert len(mlx_sinks.make_sink_cache(model, 20)) == 1
    with pytest.raises(ValueError, match="it has no rope"):
        mlx_sinks.make_sink_cache(model, 20, position_mode="local")
