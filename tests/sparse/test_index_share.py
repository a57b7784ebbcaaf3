"""Shared layers reuse the last full layer's selection: checkpoints, caches, threads."""

import copy
import json
import logging
import pickle
from threading import Thread

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import deepseek_v32, glm_moe_dsa
from mlx_lm.models.cache import (
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from mlx_lm.tuner.trainer import grad_checkpoint

import mlx_sinks
import reference
import small_models
from lines import heard
from mlx_sinks import CheckpointError, SinkPolicy
from mlx_sinks.sparse.index_share import SharedIndexer, SharingGLM, selected
from small_models import logits

HEADS = small_models.MANY_HEADS
GLM52 = {**small_models.glm52(), **HEADS}
SMALL = {**small_models.glm52(7), **HEADS}
# How 40 tokens are cut into calls: at once, in chunks, one and several at a time.
CUTS = ((40,), (16, 24), (30, *[1] * 10), (5, 20, 1, 1, 6, 7))
POLICIES = (SinkPolicy(0, 0), SinkPolicy(4, 6))


def write(folder, facts, **options):
    left_out = small_models.shared_layers(facts)
    return small_models.write_folder(
        folder, "glm_moe_dsa", without=left_out, **options, **facts
    )


def tokens(seed=0, length=40):
    return small_models.tokens(seed, length)


def expected(folder, ids, policy):
    """By NumPy, from the files of the folder."""
    weights = mx.load(str(folder / "model.safetensors"))
    return reference.logits(
        {name: np.array(weight) for name, weight in weights.items()},
        json.loads((folder / "config.json").read_text()),
        ids,
        policy.sinks,
        policy.recency,
    )


@pytest.fixture(scope="module")
def glm52(tmp_path_factory):
    """A folder with GLM-5.2's 21 full and 57 shared layers, in small."""
    return write(tmp_path_factory.mktemp("glm52"), GLM52)


@pytest.fixture
def model():
    mlx_sinks.install(SinkPolicy(4, 6))
    return small_models.make("glm_moe_dsa", **SMALL)


def test_glm_52_loads_strictly_under_the_patch_and_not_without(glm52):
    with pytest.raises(ValueError, match="Missing 285 parameters"):
        mlx_lm.load(str(glm52))
    mlx_sinks.install()
    model, _ = mlx_lm.load(str(glm52))
    weights = mx.load(str(glm52 / "model.safetensors"))
    assert dict(tree_flatten(model.parameters())).keys() == weights.keys()
    caches = [len(cache.caches) for cache in model.make_cache()]
    assert (caches.count(2), caches.count(1)) == (21, 57)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_glm_52_equals_the_reference_past_index_topk(glm52, policy):
    with mlx_sinks.patched(policy):
        model, _ = mlx_lm.load(str(glm52))
        ours = logits(model, tokens(), CUTS[3])
    assert np.abs(ours - expected(glm52, tokens(), policy)).max() < 1e-4


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_every_way_of_cutting_equals_the_reference(tmp_path, seed, policy):
    folder = write(tmp_path, SMALL, seed=seed)
    reference = expected(folder, tokens(seed), policy)
    with mlx_sinks.patched(policy):
        model, _ = mlx_lm.load(str(folder))
        for cut in CUTS:
            ours = logits(model, tokens(seed), cut)
            assert np.abs(ours - reference).max() < 1e-4, cut


def test_sharing_is_not_what_stock_does(tmp_path):
    """Else the tests above would compare two models that select alike."""
    folder = write(tmp_path, SMALL)
    shared = expected(folder, tokens(), SinkPolicy(0, 0))
    stock = small_models.make("glm_moe_dsa", **SMALL)
    assert np.abs(logits(stock, tokens(), (40,)) - shared).max() > 0.1


@pytest.mark.parametrize(
    "facts",
    [
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_pattern": "FFFSSSF"},
    ],
    ids=["frequency", "pattern"],
)
def test_the_other_forms_of_a_schedule(tmp_path, facts):
    left_out = small_models.shared_layers(SMALL)
    more = {"num_hidden_layers": 7, **HEADS, **facts}
    folder = small_models.write_folder(
        tmp_path, "glm_moe_dsa", without=left_out, **more
    )
    policy = SinkPolicy(4, 6)
    with mlx_sinks.patched(policy):
        model, _ = mlx_lm.load(str(folder))
        ours = logits(model, tokens(), (40,))
    assert np.abs(ours - expected(folder, tokens(), policy)).max() < 1e-4


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_checkpoint_loads_strictly(tmp_path, bits):
    folder = write(tmp_path, SMALL, bits=bits)
    mlx_sinks.install(SinkPolicy(4, 6))
    model, _ = mlx_lm.load(str(folder))
    kinds = {type(part).__name__ for part in model.modules()}
    assert "QuantizedLinear" in kinds
    whole = logits(model, tokens(), (40,))
    assert np.abs(logits(model, tokens(), CUTS[2]) - whole).max() < 1e-4


def test_indexers_that_a_converter_made_up_are_left_out(tmp_path):
    faithful = write(tmp_path / "faithful", SMALL)
    made_up = small_models.write_folder(tmp_path / "made up", "glm_moe_dsa", **SMALL)
    mlx_sinks.install()
    expected, _ = mlx_lm.load(str(faithful))
    with heard() as lines:
        model, _ = mlx_lm.load(str(made_up))
    (line,) = lines
    assert "15 weights of indexers in shared layers" in line
    ours = logits(model, tokens(), (40,))
    assert np.array_equal(ours, logits(expected, tokens(), (40,)))


@pytest.mark.parametrize("kind", small_models.KINDS)
def test_models_that_share_nothing_are_upstreams(kind, tmp_path):
    """GLM-5.1 and DeepSeek-V3.2."""
    folder = small_models.write_folder(tmp_path, kind)
    stock, _ = mlx_lm.load(str(folder))
    mlx_sinks.install(targets=["index_share"])
    ours, _ = mlx_lm.load(str(folder))
    assert [type(part) for part in ours.modules()] == [
        type(part) for part in stock.modules()
    ]
    cut = (20, 1, 1, 5)
    assert np.array_equal(logits(ours, tokens(), cut), logits(stock, tokens(), cut))


def test_a_models_line_says_that_it_shares():
    mlx_sinks.install()
    with heard(logging.INFO) as lines:
        for facts in ({}, SMALL, SMALL):
            make_prompt_cache(small_models.make("glm_moe_dsa", **facts))
    alone, sharing = lines
    assert "share" not in alone
    shared = SMALL["indexer_types"].count("shared")
    assert f"and the same in {shared} layers that reuse those selections" in sharing


@pytest.mark.parametrize(
    "kinds", [["shared", "full"], ["full"], ["full", "none"]], ids=str
)
def test_a_schedule_that_can_not_be_ends_with_a_sentence(kinds):
    mlx_sinks.install()
    with pytest.raises(CheckpointError, match='MLX_SINKS="index_share=0"'):
        small_models.make("glm_moe_dsa", indexer_types=kinds)


def test_a_model_outlives_the_patch(model):
    mlx_sinks.uninstall()
    shared = [
        isinstance(layer.self_attn.indexer, SharedIndexer) for layer in model.layers
    ]
    assert shared == [kind == "shared" for kind in SMALL["indexer_types"]]
    one, other = (logits(model, tokens(), cut) for cut in CUTS[1:3])
    assert np.abs(one - other).max() < 1e-4
    assert glm_moe_dsa.Model is not SharingGLM
    assert not isinstance(small_models.make("glm_moe_dsa", **SMALL), SharingGLM)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_copies_share_among_themselves(model, copied):
    whole = logits(model, tokens(), (40,))
    twin = copied(model)
    assert np.array_equal(logits(twin, tokens(), (40,)), whole)
    twin.model.layers[2].self_attn.indexer.wq_b.weight *= -1
    assert not np.array_equal(logits(twin, tokens(), (40,)), whole)
    assert np.array_equal(logits(model, tokens(), (40,)), whole)


def test_caches_are_trimmed_copied_saved_and_loaded(model, tmp_path):
    whole = logits(model, tokens(), (40,))
    cache = model.make_cache()
    logits(model, tokens()[:30], (30,), cache)
    trim_prompt_cache(cache, 5)
    try:
        save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
    except ValueError as error:
        assert "empty array" in str(error)
        pytest.skip("mlx before 0.32 can't save stock's empty values either")
    loaded = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    assert sum(c.nbytes for c in loaded) == sum(c.nbytes for c in cache)
    for each in (copy.deepcopy(cache), cache, loaded):
        rest = logits(model, tokens()[25:], (15,), each)
        assert np.abs(rest - whole[25:]).max() < 1e-4


def test_another_thread_does_not_see_a_selection(model):
    """While a forward is at a shared layer, somebody else is at one too."""
    whole, answers = logits(model, tokens(), (40,)), []

    class Watched(SharedIndexer):
        def __call__(self, *arguments, **named):
            thread = Thread(target=self.ask)
            thread.start()
            thread.join()
            return super().__call__(*arguments, **named)

        def ask(self):
            try:
                answers.append(selected())
            except ValueError as error:
                answers.append(str(error))

    for layer in model.layers:
        if isinstance(layer.self_attn.indexer, SharedIndexer):
            layer.self_attn.indexer.__class__ = Watched
    assert np.array_equal(logits(model, tokens(), (40,)), whole)
    assert len(answers) == 3
    assert all("before any full one" in answer for answer in answers)


def test_a_shared_layer_alone_has_nothing_to_reuse(model):
    with pytest.raises(ValueError, match="before any full one"):
        model.layers[3](mx.zeros((1, 20, 64)))


def test_a_compiled_model(model):
    mlx_sinks.uninstall()  # what looks at selections here can't be traced
    ids = mx.array(tokens())[None]
    assert mx.allclose(mx.compile(model)(ids), model(ids), atol=1e-4)


@pytest.mark.parametrize("last", ["full", "shared"])
@pytest.mark.parametrize("length", [12, 40])
def test_gradient_checkpoints_change_no_gradient(last, length, monkeypatch):
    """They run layers again in the backward pass, in the other order."""
    kinds = ["full", "shared", "full", "shared", last]
    mlx_sinks.install(SinkPolicy(4, 6))
    model = small_models.make(
        "glm_moe_dsa", num_hidden_layers=5, indexer_types=kinds, **HEADS
    )
    ids = mx.array(tokens(0, length + 1))[None]

    def loss(model, ids):
        return nn.losses.cross_entropy(model(ids[:, :-1]), ids[:, 1:]).mean()

    def gradients():
        _, found = nn.value_and_grad(model, loss)(model, ids)
        return {name: np.array(value) for name, value in tree_flatten(found)}

    mlx_sinks.uninstall()  # what looks at selections here can't be differentiated
    plain = gradients()
    layer = deepseek_v32.DeepseekV32DecoderLayer
    monkeypatch.setattr(layer, "__call__", layer.__call__)
    grad_checkpoint(model.layers[0])
    for name, value in gradients().items():
        np.testing.assert_allclose(value, plain[name], atol=1e-5, err_msg=name)


def test_a_class_built_on_the_models_stays_that_class():
    """A folder's own architecture, say."""
    mlx_sinks.install()

    class Mine(glm_moe_dsa.Model):
        pass

    for facts in ({}, SMALL):
        config = {**small_models.config("glm_moe_dsa"), **facts}
        mine = Mine(glm_moe_dsa.ModelArgs.from_dict(config))
        assert type(mine) is Mine
        weights = dict(tree_flatten(mine.parameters()))
        assert mine.sanitize(weights).keys() == weights.keys()
        mine.make_cache()


def test_a_policy_of_its_own_reaches_the_full_layers(model):
    assert mlx_sinks.apply(model, SinkPolicy(2, 2)) == 4
