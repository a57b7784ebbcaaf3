"""Sparse attention against float64, and against upstream's own forward."""

import importlib

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models import deepseek_v32
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import (
    BatchKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

import mlx_sinks
import small_models
from mlx_sinks import SinkPolicy
from mlx_sinks.policy import Settings
from mlx_sinks.sparse import attention as sparse
from mlx_sinks.sparse.attention import (
    ABSORBED,
    GATHERED,
    UPSTREAM,
    Shape,
    best_way,
    gathered_attention,
    sparse_forward,
)

TARGETS = ["dsa", "index_share", "sparse_attention"]
# Upstream's own selection, so that upstream's attention has the same columns.
ALWAYS, NEVER = (
    SinkPolicy(0, 0, scoring="upstream", sparse_from=keys) for keys in (1, 10**9)
)
forward = deepseek_v32.DeepseekV32Attention.__call__


def softmax(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def oracle(queries, rotated, latents, rope_keys, columns, mask, scale):
    """(B, H, L, rank) in float64, query by query."""
    B, H, L, rank = queries.shape
    out = np.zeros((B, H, L, rank))
    for b, i in np.ndindex(B, L):
        chosen = columns[b, 0, i]
        rows, positions = latents[b, 0, chosen], rope_keys[b, 0, chosen]
        logits = queries[b, :, i] @ rows.T + rotated[b, :, i] @ positions.T
        logits = np.where(mask[b, 0, i, chosen], logits * scale, -np.inf)
        out[b, :, i] = softmax(logits) @ rows
    return out


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_gathered_attention_is_the_oracles(data):
    def size(name, low, high):
        return data.draw(st.integers(low, high), name)

    B, H, L, T = (size(*each) for each in zip("BHLT", (1, 1, 1, 6), (3, 4, 9, 20)))
    k, rank, rope = size("k", 1, T), size("rank", 1, 6), 2
    dice = np.random.default_rng(size("seed", 0, 99))
    queries, rotated, latents, rope_keys = (
        dice.standard_normal(shape)
        for shape in (
            (B, H, L, rank),
            (B, H, L, rope),
            (B, 1, T, rank),
            (B, 1, T, rope),
        )
    )
    drawn = [dice.permutation(T)[:k] for _ in range(B * L)]
    columns = np.array(drawn, np.uint32).reshape(B, 1, L, k)
    mask = dice.random((B, 1, L, T)) < 0.7
    np.put_along_axis(mask, columns[..., :1].astype(int), True, axis=-1)
    given_mask = None if data.draw(st.booleans(), "no mask") else mask
    shown = np.ones_like(mask) if given_mask is None else mask
    ours = gathered_attention(
        *(mx.array(a.astype(np.float32)) for a in (queries, rotated)),
        *(mx.array(a.astype(np.float32)) for a in (latents, rope_keys)),
        mx.array(columns),
        None if given_mask is None else mx.array(mask),
        0.3,
        memory=size("memory", 1, 20_000),
    )
    expected = oracle(queries, rotated, latents, rope_keys, columns, shown, 0.3)
    np.testing.assert_allclose(np.array(ours), expected, rtol=1e-4, atol=1e-5)


def test_a_query_that_sees_nothing_is_a_number():
    ones = mx.ones((1, 1, 2, 4))
    columns = mx.array([[[[0, 1], [0, 1]]]])
    out = gathered_attention(
        ones, ones, ones, ones, columns, mx.zeros((2, 2), mx.bool_), 1.0, 1
    )
    assert mx.isfinite(out).all().item()


# ---------------------------------------------------------------------- a layer


def layer(dtype=mx.float32, bits=None, seed=0, **more):
    model = small_models.make(seed=seed, dtype=dtype, **more)
    attention = model.layers[0].self_attn
    if bits:
        nn.quantize(attention, group_size=32, bits=bits)
    attention.eval()
    return attention


def called(attention, steps, *, padding=None, way=None, kinds=(KVCache, KVCache)):
    """The outputs of real tokens in steps, by upstream's forward or by a way."""
    B = len(padding or (0,))
    cache = [kind() for kind in kinds]
    if padding:
        cache = [BatchKVCache(list(padding)) for _ in kinds]
    seen, rows = 0, [[] for _ in range(B)]
    for number, L in enumerate(steps):
        key = mx.random.key(number)
        x = mx.random.normal((B, L, attention.hidden_size), key=key)
        mask = create_attention_mask(x, cache[0], return_array=True)
        if way and L > 1:
            out = sparse_forward(forward, attention, x, mask, cache, way, memory=9)
        else:
            out = forward(attention, x, mask, cache)
        for b, pad in enumerate(padding or (0,)):
            rows[b].append(np.array(out[b, max(0, pad - seen) :].astype(mx.float32)))
        seen += L
    return np.concatenate([each for row in rows for each in row])


CASES = {
    "at once": ([50], None),
    "in cuts": ([9, 8, 20, 1, 12], None),
    "left-padded": ([20, 7, 1, 9], (11, 0, 3)),
}


@pytest.mark.parametrize("way", [ABSORBED, GATHERED])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("bits", [None, 4], ids=["float32", "4-bit"])
def test_a_layer_returns_what_upstreams_does(way, case, bits):
    steps, padding = CASES[case]
    attention = layer(bits=bits)
    expected = called(attention, steps, padding=padding)
    ours = called(attention, steps, padding=padding, way=way)
    assert np.abs(ours - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("way", [ABSORBED, GATHERED])
def test_without_a_cache(way):
    attention = layer()
    x = mx.random.normal((2, 40, attention.hidden_size))
    mask = create_attention_mask(x, None, return_array=True)
    ours = sparse_forward(forward, attention, x, mask, None, way, memory=1)
    assert mx.allclose(ours, forward(attention, x, mask, None), atol=1e-5).item()


class Given:
    """Selects what it is given, in any precision."""

    index_topk = small_models.INDEX_TOPK

    def __init__(self, L):
        dice = np.random.default_rng(0)
        k = self.index_topk
        rows = [dice.permutation(max(i + 1, k))[:k] for i in range(L)]
        self.columns = mx.array(np.stack(rows).astype(np.uint32))[None, None]

    def __call__(self, x, qr, mask, cache=None):
        return self.columns


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_half_precision_is_as_near_to_float64_as_upstreams(dtype):
    """The same half-precision weights and inputs; the reference is all in float32."""
    L, ours, theirs = 64, [], []
    for seed in range(4):
        attention, exact = layer(dtype, seed=seed), layer(seed=seed)
        exact.load_weights(
            [
                (name, value.astype(mx.float32))
                for name, value in tree_flatten(attention.parameters())
            ]
        )
        attention.indexer = exact.indexer = Given(L)
        x = mx.random.normal((1, L, attention.hidden_size)).astype(dtype)
        mask = create_attention_mask(x, None, return_array=True)
        expected = forward(exact, x.astype(mx.float32), mask)
        gathered = sparse_forward(forward, attention, x, mask, None, GATHERED, 10**6)
        assert gathered.dtype == dtype
        for found, errors in ((gathered, ours), (forward(attention, x, mask), theirs)):
            errors.append(mx.square(found.astype(mx.float32) - expected).mean().item())
    assert sum(ours) <= 1.02 * sum(theirs)


def test_a_gradient_is_upstreams():
    """In eval mode: nothing is trained there, but somebody may ask."""
    attention = layer()
    attention.indexer = Given(40)  # mlx-lm 0.31 has no gradient beside a selection
    x = mx.random.normal((1, 40, attention.hidden_size))
    mask = create_attention_mask(x, None, return_array=True)

    def gradient(call):
        loss = nn.value_and_grad(attention, lambda layer: call(layer).square().sum())
        return dict(tree_flatten(loss(attention)[1]))

    expected = gradient(lambda layer: forward(layer, x, mask))
    ours = gradient(
        lambda layer: sparse_forward(forward, layer, x, mask, None, GATHERED, 9)
    )
    for name, each in expected.items():
        assert mx.allclose(ours[name], each, rtol=1e-3, atol=1e-4).item(), name


def test_it_can_be_compiled():
    attention = layer()
    x = mx.random.normal((1, 40, attention.hidden_size))
    mask = create_attention_mask(x, None, return_array=True)

    def call(x):
        return sparse_forward(forward, attention, x, mask, None, GATHERED, memory=9)

    assert mx.allclose(mx.compile(call)(x), call(x), atol=1e-5).item()


# ---------------------------------------------------------------- whole models


def counted(monkeypatch):
    """How often rows are gathered."""
    calls = []

    def counting(*arguments):
        calls.append(arguments)
        return gathered_attention(*arguments)

    monkeypatch.setattr(sparse, "gathered_attention", counting)
    return calls


def evaluated(model):
    model.eval()
    return model


@pytest.mark.parametrize("kind", small_models.KINDS)
@pytest.mark.parametrize("cuts", [[80], [30, 50], [20, 1, 9, 50]])
def test_a_models_logits_are_upstreams(kind, cuts):
    model, tokens = evaluated(small_models.make(kind)), small_models.tokens(1, 80)
    expected = small_models.logits(model, tokens, cuts)
    for policy in (ALWAYS, NEVER):
        with mlx_sinks.patched(policy, TARGETS):
            ours = small_models.logits(model, tokens, cuts)
        assert np.abs(ours - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("kind", small_models.KINDS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_with_all_of_it_off_a_model_is_upstreams_to_the_bit(kind, dtype):
    value = "sinks=0,recency=0,scoring=upstream,sparse_attention=0"
    asked = Settings.from_env({"MLX_SINKS": value})
    model, tokens = small_models.make(kind, dtype=dtype), small_models.tokens(1, 80)
    model.eval()
    expected = small_models.logits(model, tokens, [30, 1, 49])
    with mlx_sinks.patched(asked.policy, asked.targets):
        ours = small_models.logits(model, tokens, [30, 1, 49])
    assert np.array_equal(ours, expected)


def test_all_layers_of_a_model_that_shares_take_it(monkeypatch, tmp_path):
    calls = counted(monkeypatch)
    facts = small_models.glm52(9)
    with mlx_sinks.patched(ALWAYS, TARGETS):
        shared = importlib.import_module("mlx_sinks.sparse.index_share").SharingGLM
        model = evaluated(small_models.make("glm_moe_dsa", **facts))
        assert type(model) is shared
        tokens = small_models.tokens(1, 60)
        calls.clear()  # those of the self-check
        ours = small_models.logits(model, tokens, [30, 30])
        assert len(calls) == 2 * 9
    calls.clear()
    expected = small_models.logits(model, tokens, [30, 30])  # it outlives the patch
    assert calls == []
    assert np.abs(ours - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize(
    "change",
    ["one token", "all fits", "training", "another cache", "off"],
)
def test_what_goes_upstreams_way_is_upstreams_to_the_bit(monkeypatch, change):
    calls = counted(monkeypatch)
    attention, steps = layer(), [30] + [1] * 5 if change == "one token" else [50]
    kinds = (KVCache, KVCache)
    if change == "all fits":
        steps = [small_models.INDEX_TOPK - 4, 4]
    elif change == "training":
        attention.train()
    elif change == "another cache":
        kinds = (lambda: RotatingKVCache(max_size=99), KVCache)
    expected = called(attention, steps, kinds=kinds)
    names = TARGETS[:2] if change == "off" else TARGETS
    with mlx_sinks.patched(ALWAYS, names):
        patched = deepseek_v32.DeepseekV32Attention.__call__
        assert (patched is forward) == (change == "off")
        calls.clear()  # those of the self-check
        cache, ours = [kind() for kind in kinds], []
        for number, L in enumerate(steps):
            shape = (1, L, attention.hidden_size)
            x = mx.random.normal(shape, key=mx.random.key(number))
            mask = create_attention_mask(x, cache[0], return_array=True)
            ours.append(np.array(attention(x, mask, cache))[0])
    if change == "one token":
        # The first step is ours, the others read what it stored.
        assert len(calls) == 1
        assert np.array_equal(np.concatenate(ours)[30:], expected[30:])
    else:
        assert calls == []
        assert np.array_equal(np.concatenate(ours), expected)


@pytest.mark.parametrize("facts", [{}, small_models.glm52(5)], ids=["all", "shared"])
@pytest.mark.parametrize("padding", [None, [7, 0]], ids=["alone", "batch"])
def test_a_probe_records_the_same(monkeypatch, facts, padding):
    """It replays upstream's own forward, whatever stands in its place."""
    calls, recordings = counted(monkeypatch), []
    with mlx_sinks.patched(ALWAYS, TARGETS[:2]):
        model = evaluated(small_models.make("glm_moe_dsa", **facts))
        for names in (TARGETS[:2], TARGETS):
            rows = [small_models.tokens(n, 70) for n in range(len(padding or [0]))]
            cache = make_prompt_cache(model)
            if padding:
                cache = [each.merge([each] * len(padding)) for each in cache]
                for each in cache:
                    each.prepare(left_padding=padding)
            with mlx_sinks.patched(ALWAYS, names):
                calls.clear()
                with mlx_sinks.probe(model, block=16) as recording:
                    model(mx.array(rows)[:, :40], cache=cache)
                    mx.eval(model(mx.array(rows)[:, 40:], cache=cache))
                assert (len(calls) > 0) == (names == TARGETS)
            recordings.append(recording)
    stock, ours = (each.metric("mass") for each in recordings)
    assert np.isfinite(stock).sum() > len(model.layers)
    np.testing.assert_allclose(ours, stock, rtol=1e-4)


def test_a_models_own_policy_says_when():
    attention = layer()
    attention.indexer.sink_policy = SinkPolicy(0, 0, sparse_from=10**9)
    x = mx.random.normal((1, 50, attention.hidden_size))
    mask = create_attention_mask(x, None, return_array=True)
    shape = Shape.of(attention)
    way = best_way(shape, small_models.INDEX_TOPK, 50, 50, 10**9)
    with mlx_sinks.patched(ALWAYS, TARGETS):
        ours = attention(x, mask)
    same = forward(attention, x, mask)
    if way != UPSTREAM:
        same = sparse_forward(forward, attention, x, mask, None, way, 10**6)
    assert mx.allclose(ours, same, atol=1e-6).item()


# -------------------------------------------------------------------- which way

GLM_5 = Shape(heads=64, rank=512, rope=64, nope=192, values=256)


def test_few_queries_of_a_long_context_gather():
    for T in (8_192, 32_768, 131_072):
        assert best_way(GLM_5, 2_048, 4, T) == GATHERED
        assert best_way(GLM_5, 2_048, 64, T) == GATHERED


def test_the_products_are_those_of_the_documents():
    assert GLM_5.products(GATHERED, 2_048, 64, 32_768) == 2_048 * (1_024 + 64)
    assert GLM_5.products(ABSORBED, 2_048, 64, 32_768) == 32_768 * (1_024 + 64)
    dense = 32_768 * (64 + 448) + 32_768 * 512 * 448 / 64
    assert GLM_5.products(UPSTREAM, 2_048, 64, 32_768) == dense


@given(st.integers(2, 4_096), st.integers(2_049, 200_000), st.integers(1, 200_000))
def test_sparse_from_decides(L, T, sparse_from):
    way = best_way(GLM_5, 2_048, L, T, sparse_from)
    assert (way == GATHERED) == (T >= sparse_from)
    costly = best_way(GLM_5, 2_048, L, T)
    if T < sparse_from and costly != GATHERED:
        assert way == costly
