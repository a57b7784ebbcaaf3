"""Indexers rotate and normalise as their checkpoint and the reference have it."""

import importlib
import json
import logging

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models import deepseek_v32
from mlx_lm.models.cache import make_prompt_cache

import mlx_sinks
import reference
import small_models
from lines import heard
from mlx_sinks import SinkPolicy
from mlx_sinks.patches.registry import patch_of

# Enough heads that no two columns tie at a score of nought.
HEADS = {"index_n_heads": 24}
TOKENS = np.random.default_rng(0).integers(0, 256, 40).tolist()
NOTHING = SinkPolicy(0, 0)
READS_CONVENTION = hasattr(deepseek_v32.ModelArgs(), "indexer_rope_interleave")


def logits_and_reference(folder):
    model, _ = mlx_lm.load(str(folder))
    weights = mx.load(str(folder / "model.safetensors"))
    expected = reference.logits(
        {name: np.array(weight) for name, weight in weights.items()},
        json.loads((folder / "config.json").read_text()),
        TOKENS,
    )
    return np.array(model(mx.array(TOKENS)[None]))[0], expected


@pytest.mark.parametrize("interleave", [None, True, False])
@pytest.mark.parametrize("kind", small_models.KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_both_conventions_equal_the_reference(tmp_path, kind, interleave, seed):
    stated = {} if interleave is None else {"indexer_rope_interleave": interleave}
    folder = small_models.write_folder(tmp_path, kind, seed=seed, **HEADS, **stated)
    with mlx_sinks.patched(NOTHING):
        ours, expected = logits_and_reference(folder)
    assert np.abs(ours - expected).max() < 1e-4


def test_the_conventions_differ(tmp_path):
    """Else the test above could not fail."""
    for interleave in (True, False):
        stated = {**HEADS, "indexer_rope_interleave": interleave}
        small_models.write_folder(tmp_path / str(interleave), **stated)
    mlx_sinks.install(NOTHING)
    one, other = (logits_and_reference(tmp_path / n)[0] for n in ("True", "False"))
    assert np.abs(one - other).max() > 0.1


def test_small_keys_are_normalised_as_in_the_reference(tmp_path):
    """Where the epsilon matters: with 1e-5 other columns are selected."""
    folder = small_models.write_folder(tmp_path, **HEADS, indexer_rope_interleave=True)
    weights = mx.load(str(folder / "model.safetensors"))
    for name in weights:
        if name.endswith("indexer.wk.weight"):
            weights[name] *= 1e-3
        if name.endswith("k_norm.bias"):
            weights[name] += mx.random.normal(weights[name].shape, key=mx.random.key(0))
    mx.eval(weights)  # read from the file that is written next
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    with mlx_sinks.patched(NOTHING):
        ours, expected = logits_and_reference(folder)
    assert np.abs(ours - expected).max() < 1e-4
    stock, _ = logits_and_reference(folder)
    assert np.abs(stock - expected).max() > 0.1


ROPES = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 8.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    },
    "proportional": {"partial_rotary_factor": 0.5},
    "mrope": {"mrope_section": [2, 3, 3]},
}
# Its class in mlx-lm rotates halves, whatever it is asked for.
WITHOUT_A_SWITCH = {"longrope"}


@pytest.mark.parametrize("stated", [None, 0, 1])
@pytest.mark.parametrize("kind", small_models.KINDS)
def test_a_convention_that_upstream_cannot_run_is_mended(kind, stated, tmp_path):
    """Not true and not false: mlx-lm 0.32 hands it to a kernel that takes neither."""
    told = {True: True, False: False, None: kind == "glm_moe_dsa"}[stated]
    folders = [
        small_models.write_folder(tmp_path / name, kind, indexer_rope_interleave=value)
        for name, value in (("odd", stated), ("plain", told))
    ]
    mlx_sinks.install(NOTHING)
    odd, plain = (logits_and_reference(folder)[0] for folder in folders)
    assert np.array_equal(odd, plain)


def test_a_convention_that_is_no_truth_is_refused_with_what_helps(tmp_path):
    folder = small_models.write_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["indexer_rope_interleave"] = "false"
    (folder / "config.json").write_text(json.dumps(config))
    mlx_sinks.install(NOTHING)
    with pytest.raises(ValueError, match='true or false.*"indexer_fidelity=0"'):
        mlx_lm.load(str(folder))


def with_rope(kind, rope_type, interleave):
    """A checkpoint's configuration, in its kind's words."""
    rope = {"rope_type": rope_type, **ROPES[rope_type]}
    facts = {**small_models.config(kind), "indexer_rope_interleave": interleave}
    if kind == "glm_moe_dsa":
        return {**facts, "rope_parameters": {**rope, "rope_theta": 10000.0}}
    return {**facts, "rope_scaling": rope}


def built(facts):
    module = importlib.import_module(f"mlx_lm.models.{facts['model_type']}")
    try:
        model = module.Model(module.ModelArgs.from_dict(facts))
    except ValueError as error:
        pytest.skip(str(error))  # this release doesn't know the kind
    return [layer.self_attn.indexer for layer in model.layers]


def partner_of_the_first(indexer):
    """The number of the dim that rotates together with dim 0."""
    turned = indexer.rope(mx.eye(16)[None, None, :1], offset=1)[0, 0, 0]
    (partner,) = np.flatnonzero(np.abs(np.array(turned))[1:] > 1e-3) + 1
    return partner


@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("kind", small_models.KINDS)
@pytest.mark.parametrize("rope_type", ROPES)
def test_every_rotary_embedding_follows_the_checkpoint_or_is_left(
    rope_type, kind, interleave
):
    facts = with_rope(kind, rope_type, interleave)
    stock = built(facts)
    with heard() as lines, mlx_sinks.patched(targets=["indexer_fidelity"]):
        ours = built(facts)
    for before, after in zip(stock, ours):
        assert type(after.rope) is type(before.rope)
        followed = rope_type not in WITHOUT_A_SWITCH or not interleave
        asked = 1 if interleave else 8
        assert partner_of_the_first(after) == (asked if followed else 8)
        assert any("left as mlx-lm has them" in line for line in lines) != followed


@pytest.mark.parametrize("kind", small_models.KINDS)
def test_a_models_line_says_where_the_convention_was_mended(kind, tmp_path):
    folder = small_models.write_folder(tmp_path, kind)
    mlx_sinks.install()
    with heard(logging.INFO) as lines:
        make_prompt_cache(mlx_lm.load(str(folder))[0])
    (line,) = lines
    mended = not READS_CONVENTION and kind == "deepseek_v32"
    assert ("and the checkpoint's rotary embedding of indexers (" in line) == mended


def test_models_of_other_kinds_are_left_alone(tmp_path):
    folder = small_models.write_llama_folder(tmp_path)
    stock, _ = mlx_lm.load(str(folder))
    mlx_sinks.install()
    ours, _ = mlx_lm.load(str(folder))
    assert vars(ours.args) == vars(stock.args)


def test_an_indexer_that_is_built_otherwise_is_refused(monkeypatch):
    def without_norm(self, args):
        upstream(self, args)
        del self["k_norm"]

    upstream = deepseek_v32.Indexer.__init__
    without_norm.__module__ = deepseek_v32.__name__
    monkeypatch.setattr(deepseek_v32.Indexer, "__init__", without_norm)
    with pytest.raises(mlx_sinks.PatchError, match="k_norm has no eps"):
        mlx_sinks.install(targets=["indexer_fidelity"])
    assert not patch_of("indexer_fidelity").is_on(deepseek_v32)
