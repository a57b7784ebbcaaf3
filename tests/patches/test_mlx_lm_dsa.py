"""The patched Indexer inside upstream's models: as stock with nothing forced."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import deepseek_v32
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache, make_prompt_cache

import mlx_sinks
import small_models
from mlx_sinks import SinkPolicy
from mlx_sinks.patches.registry import patch_of

# Bit for bit is a promise of upstream's own arithmetic alone.
NOTHING = SinkPolicy(0, 0, scoring="upstream")
TOPK = small_models.INDEX_TOPK
LENGTH = 60
CUTS = {"whole": [60], "chunks": [7, 20, 30, 3], "decode": [40, 1, 1, 1, 5, 1, 1, 10]}
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def tokens(seed, length=LENGTH):
    return mx.array(np.random.default_rng(seed).integers(0, 256, (1, length)))


def logits(model, inputs, cuts, cache):
    """All logits of a sequence that is given to the model in pieces."""
    parts, start = [], 0
    for length in cuts:
        parts.append(model(inputs[:, start : start + length], cache))
        mx.eval(parts[-1], [layer.state for layer in cache or []])
        start += length
    return np.array(mx.concatenate(parts, axis=1).astype(mx.float32))


def padded_cache(model, padding):
    caches = [make_prompt_cache(model) for _ in padding]
    merged = [type(rows[0]).merge(rows) for rows in zip(*caches)]
    for layer in merged:
        layer.prepare(left_padding=list(padding))
    return merged


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", small_models.KINDS)
def test_logits_equal_stock_bit_for_bit_with_nothing_forced(kind, dtype, bits):
    for seed, cuts in enumerate(CUTS.values()):
        model = small_models.make(kind, seed=seed, dtype=DTYPES[dtype], bits=bits)
        inputs = tokens(seed)
        stock = logits(model, inputs, cuts, make_prompt_cache(model))
        with mlx_sinks.patched(NOTHING):
            ours = logits(model, inputs, cuts, make_prompt_cache(model))
        np.testing.assert_array_equal(ours, stock)


@pytest.mark.parametrize("kind", small_models.KINDS)
def test_scored_by_blocks_the_same_columns_are_selected(kind):
    """Many heads, so that no two scores are equal; a block of one query and of all."""
    for seed, cuts in enumerate(CUTS.values()):
        model = small_models.make(kind, seed=seed, index_n_heads=24)
        inputs = tokens(seed)
        stock = logits(model, inputs, cuts, make_prompt_cache(model))
        for memory in (1, None):
            with mlx_sinks.patched(SinkPolicy(0, 0, score_memory=memory)):
                ours = logits(model, inputs, cuts, make_prompt_cache(model))
            np.testing.assert_allclose(ours, stock, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_left_padded_batch_equals_stock_with_nothing_forced(dtype):
    padding = (0, 13, 30)
    model = small_models.make(dtype=DTYPES[dtype])
    inputs = mx.concatenate([tokens(seed) for seed in range(3)])
    stock = logits(model, inputs, CUTS["decode"], padded_cache(model, padding))
    with mlx_sinks.patched(NOTHING):
        ours = logits(model, inputs, CUTS["decode"], padded_cache(model, padding))
    np.testing.assert_array_equal(ours, stock)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(3))
def test_selected_sets_equal_stock_at_glm_width(seed, dtype):
    """64 heads of 128, as GLM-5: sums long enough for their order to matter."""
    args = deepseek_v32.ModelArgs(
        hidden_size=256, q_lora_rank=128, index_topk=64, index_n_heads=64
    )
    mx.random.seed(seed)
    indexer = deepseek_v32.Indexer(args)
    indexer.set_dtype(DTYPES[dtype])
    states = mx.random.normal((1, 300, 256)).astype(DTYPES[dtype])
    queries = mx.random.normal((1, 300, 128)).astype(DTYPES[dtype])

    def selected():
        cache, rows = KVCache(), []
        for part in (slice(0, 250), slice(250, 251), slice(251, 300)):
            x, qr = states[:, part], queries[:, part]
            mask = create_attention_mask(x, cache, return_array=True)
            columns = np.sort(np.array(indexer(x, qr, mask, cache)))[0, 0]
            # Queries before index_topk have free slots: any column fills them.
            rows.append(columns[64:] if part.start == 0 else columns)
        return np.concatenate(rows)

    stock = selected()
    with mlx_sinks.patched(NOTHING):
        np.testing.assert_array_equal(selected(), stock)


@pytest.mark.parametrize("policy", [NOTHING, SinkPolicy(4, 8)])
def test_the_indexer_cache_holds_what_stock_stores(policy):
    """A prompt cache saved under one of them is loaded under the other."""
    model = small_models.make()
    caches = []
    for patch in (False, True):
        if patch:
            mlx_sinks.install(policy)
        cache = make_prompt_cache(model)
        logits(model, tokens(0, TOPK), [10, 6], cache)
        caches.append([layer[1] for layer in cache])
    for stock, ours in zip(*caches):
        assert stock.values.shape == ours.values.shape
        assert stock.values.dtype == ours.values.dtype
        assert mx.array_equal(stock.keys, ours.keys)
        assert stock.offset == ours.offset


@pytest.mark.parametrize("kind", small_models.KINDS)
def test_chunk_sizes_do_not_matter(kind):
    model = small_models.make(kind)
    inputs = tokens(5)
    with mlx_sinks.patched(SinkPolicy(4, 6)):
        reference = logits(model, inputs, [LENGTH], None)
        for chunk in (1, 7, 16, 17):
            cuts = [chunk] * (LENGTH // chunk) + [LENGTH % chunk] * (LENGTH % chunk > 0)
            ours = logits(model, inputs, cuts, make_prompt_cache(model))
            np.testing.assert_allclose(ours, reference, rtol=1e-3, atol=2e-4)


def test_find_reaches_each_layer_of_both_kinds():
    for kind in small_models.KINDS:
        model = small_models.make(kind)
        assert len(patch_of("dsa").find(model, deepseek_v32)) == 2


def test_left_padding_moves_the_sinks():
    """The first real columns are kept, not the padding's."""
    padding, kept = (0, 9), []
    model = small_models.make()
    mlx_sinks.install(SinkPolicy(4, 2))
    attention = model.layers[0].self_attn
    indexer = attention.indexer

    def watched(*arguments, **named):
        kept.append(indexer(*arguments, **named))
        return kept[-1]

    attention.indexer = watched
    inputs = mx.concatenate([tokens(seed, 40) for seed in range(2)])
    logits(model, inputs, [36, 1, 3], padded_cache(model, padding))
    for columns in kept[1:]:
        for f, row in zip(padding, columns.tolist()):
            for query in row[0]:
                assert set(range(f, f + 4)) <= set(query)
