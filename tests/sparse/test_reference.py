"""Stock mlx-lm and the patched indexer, held against a NumPy float64 forward."""

import dataclasses
import importlib

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import deepseek_v32
from mlx_lm.models.base import create_attention_mask

import mlx_sinks
import reference
import small_models
from small_models import INDEX_TOPK, KINDS

LENGTH = 40
TOLERANCE = 1e-4  # of the logits' standard deviation; measured: below 1e-5
# Older releases interleave the indexer's RoPE whatever the config says.
READS_CONVENTION = "indexer_rope_interleave" in {
    field.name for field in dataclasses.fields(deepseek_v32.ModelArgs)
}
# Where four heads' relu leaves columns tied at 0 now and then, sixteen never do.
FACTS = dict(
    num_hidden_layers=3,
    index_n_heads=16,
    n_routed_experts=8,
    moe_layer_freq=2,
    n_group=2,
    routed_scaling_factor=2.5,
    attention_bias=True,
)
EACH_KIND = pytest.mark.parametrize("kind", KINDS)


def small_config(kind, **changes):
    """`indexer_rope_interleave=None` leaves the key out, as checkpoints do."""
    facts = {**small_models.config(kind), **FACTS, **changes}
    if facts.get("indexer_rope_interleave", False) is None:
        del facts["indexer_rope_interleave"]
    return facts


def interleaved(kind, **changes):
    """A config that all releases read alike."""
    return small_config(kind, indexer_rope_interleave=True, **changes)


def stock(config, seed=0):
    """A float32 model, vectors random too, with the reference's k_norm; its weights."""
    upstream = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = upstream.Model(upstream.ModelArgs.from_dict(config))
    rng = np.random.default_rng(seed)
    weights = {}
    for name, value in tree_flatten(model.parameters()):
        noise = rng.standard_normal(value.shape)
        if value.ndim > 1:
            noise /= value.shape[-1] ** 0.5
        else:
            noise = 0.1 * noise + name.endswith("norm.weight")
        weights[name] = noise.astype(np.float32)
    model.load_weights([(name, mx.array(value)) for name, value in weights.items()])
    for layer in model.layers:
        layer.self_attn.indexer.k_norm.eps = 1e-6
    return model, weights


def tokens_of(seed, length=LENGTH):
    return np.random.default_rng(1000 + seed).integers(0, 256, length).tolist()


def logits_of(model, tokens):
    return np.array(model(mx.array([tokens]))[0])


def distance(logits, expected):
    """The greatest difference, in standard deviations of the logits."""
    return np.abs(logits - expected).max() / expected.std()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("convention", [True, False, None])
@EACH_KIND
def test_stock_computes_the_reference(kind, convention, seed):
    config = small_config(kind, indexer_rope_interleave=convention)
    half_split = convention is False or (convention is None and kind == "deepseek_v32")
    if half_split and not READS_CONVENTION:
        pytest.skip("this mlx-lm interleaves the indexer's RoPE always")
    model, weights = stock(config, seed)
    tokens = tokens_of(seed)
    expected = reference.logits(weights, config, tokens)
    assert distance(logits_of(model, tokens), expected) < TOLERANCE


@EACH_KIND
def test_what_fits_is_dense(kind):
    config = interleaved(kind)
    model, weights = stock(config)
    tokens = tokens_of(0, INDEX_TOPK)
    assert reference.selections(weights, config, tokens) == [None] * 3
    expected = reference.logits(weights, config, tokens)
    assert distance(logits_of(model, tokens), expected) < TOLERANCE


@EACH_KIND
def test_the_convention_shows(kind):
    """Else the parity above would hold whichever of the two either side took."""
    _, weights = stock(small_config(kind))
    by_default, pairs, halves = (
        reference.logits(
            weights,
            small_config(kind, indexer_rope_interleave=convention),
            tokens_of(0),
        )
        for convention in (None, True, False)
    )
    assert distance(pairs, halves) > 100 * TOLERANCE
    expected = pairs if kind == "glm_moe_dsa" else halves
    np.testing.assert_array_equal(by_default, expected)


@EACH_KIND
def test_decoding_from_a_cache_computes_it_too(kind):
    config = interleaved(kind)
    model, weights = stock(config)
    tokens, cache, rows = tokens_of(0), model.make_cache(), []
    for part in (tokens[:10], tokens[10:30], *([token] for token in tokens[30:])):
        rows.append(np.array(model(mx.array([part]), cache=cache)[0]))
    expected = reference.logits(weights, config, tokens)
    assert distance(np.concatenate(rows), expected) < TOLERANCE


@pytest.mark.parametrize("sinks, recency", [(4, 0), (0, 5), (3, 4), (6, 64)])
@EACH_KIND
def test_the_guarantee_computes_the_references_forced_columns(kind, sinks, recency):
    config = interleaved(kind)
    model, weights = stock(config)
    tokens = tokens_of(0)
    with mlx_sinks.patched(mlx_sinks.SinkPolicy(sinks, recency), targets=["dsa"]):
        logits = logits_of(model, tokens)
    expected = reference.logits(weights, config, tokens, sinks, recency)
    assert distance(logits, expected) < TOLERANCE
    assert distance(logits_of(model, tokens), expected) > 100 * TOLERANCE


@pytest.mark.parametrize("seed", range(5))
def test_an_indexer_alone_selects_the_same_columns(seed):
    config = interleaved("deepseek_v32")
    model, weights = stock(config, seed)
    rng = np.random.default_rng(seed)
    x, qr = rng.standard_normal((2, LENGTH, 64)).astype(np.float32)  # both ranks are 64
    mask = create_attention_mask(mx.array(x[None]), None, return_array=True)
    chosen = model.layers[0].self_attn.indexer(
        mx.array(x[None]), mx.array(qr[None]), mask
    )
    selected = np.zeros((LENGTH, LENGTH), bool)
    np.put_along_axis(selected, np.array(chosen[0, 0]).astype(int), True, axis=-1)

    own = reference.under(weights, "model.layers.0.self_attn.indexer.")
    scores = reference.index_scores(own, config, x, qr)
    expected = reference.select(scores, INDEX_TOPK)
    np.testing.assert_array_equal(selected & np.tri(LENGTH, dtype=bool), expected)
    rows = np.arange(1, LENGTH + 1)
    np.testing.assert_array_equal(expected.sum(-1), np.minimum(rows, INDEX_TOPK))


def test_small_keys_show_k_norms_eps():
    """Upstream's 1e-5 chooses other columns where keys are small, 1e-6 the same."""
    config = interleaved("deepseek_v32")
    model, weights = stock(config)
    for n, layer in enumerate(model.layers):
        wk = layer.self_attn.indexer.wk
        wk.weight = wk.weight * 1e-3
        weights[f"model.layers.{n}.self_attn.indexer.wk.weight"] = np.array(wk.weight)
    tokens = tokens_of(0)
    expected = reference.logits(weights, config, tokens)
    assert distance(logits_of(model, tokens), expected) < TOLERANCE
    for layer in model.layers:
        layer.self_attn.indexer.k_norm.eps = 1e-5
    assert distance(logits_of(model, tokens), expected) > 100 * TOLERANCE


class Remembered:
    """An indexer whose last selection other layers can ask for."""

    def __init__(self, indexer):
        self.indexer = indexer

    def __call__(self, *args, **kwargs):
        self.last = self.indexer(*args, **kwargs)
        return self.last

    def again(self, *args, **kwargs):
        return self.last


def share(model, full):
    """Stock layers, their indexers replaced by the last full layer's selection."""
    for layer, is_full in zip(model.layers, full):
        if is_full:
            owner = Remembered(layer.self_attn.indexer)
        layer.self_attn.indexer = owner if is_full else owner.again


FULL = [True, True, False, False, True, False]
SPELLINGS = [
    {"indexer_types": ["full" if full else "shared" for full in FULL]},
    {"index_topk_pattern": "FFSSFS"},
    {"index_topk_pattern": ["full" if full else "shared" for full in FULL]},
    {"index_topk_freq": 3},
    {"index_topk_freq": 3, "index_skip_topk_offset": 2, "index_topk_pattern": None},
    {"index_topk_pattern": "FFSSFS", "index_topk_freq": 1},
    {"indexer_types": ["full"] * 2 + ["shared"] * 2 + ["full", "shared"] * 2},
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_each_spelling_of_a_schedule_is_read(spelling):
    facts = {"model_type": "glm_moe_dsa", "num_hidden_layers": 6, **spelling}
    assert reference.full_layers(facts) == FULL
    plain = {"model_type": "deepseek_v32", "num_hidden_layers": 6, **spelling}
    assert reference.full_layers(plain) == [True] * 6


@pytest.mark.parametrize("freq", [None, 1])
def test_without_a_schedule_every_layer_is_full(freq):
    facts = {"model_type": "glm_moe_dsa", "num_hidden_layers": 6}
    assert reference.full_layers({**facts, "index_topk_freq": freq}) == [True] * 6


def test_a_first_layer_has_nothing_to_share():
    facts = {"model_type": "glm_moe_dsa", "num_hidden_layers": 2}
    with pytest.raises(ValueError, match="layer 0"):
        reference.full_layers({**facts, "index_topk_pattern": "SF"})


@pytest.mark.parametrize("seed", range(3))
def test_shared_layers_use_the_last_full_layers_columns(seed):
    config = interleaved("glm_moe_dsa", num_hidden_layers=6)
    sharing = {**config, "index_topk_pattern": "FFSSFS"}
    model, weights = stock(config, seed)
    tokens = tokens_of(seed)
    unshared = reference.logits(weights, config, tokens)
    unused = tuple(f"model.layers.{i}.self_attn.indexer." for i in (2, 3, 5))
    weights = {n: v for n, v in weights.items() if not n.startswith(unused)}

    share(model, FULL)
    expected = reference.logits(weights, sharing, tokens)
    assert distance(logits_of(model, tokens), expected) < TOLERANCE
    assert distance(unshared, expected) > 100 * TOLERANCE
    layers = reference.selections(weights, sharing, tokens)
    assert all((layers[i] == layers[1]).all() for i in (2, 3))
    assert (layers[5] == layers[4]).all()
    assert (layers[4] != layers[1]).any()
