"""The zoo's kinds of indexers are what their names say, on a model in miniature."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import mlx_sinks
from mlx_sinks.sparse.selection import watching
from smollm2 import zoo
from smollm2.build import random_indexers
from smollm2.smollm2_dsa import Model, ModelArgs
from tools.arms import arms, indexers

LAYERS, INDEX_TOPK, TOKENS = 8, 12, 40
FACTS = dict(
    model_type="llama",
    hidden_size=64,
    num_hidden_layers=LAYERS,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    rms_norm_eps=1e-5,
    vocab_size=100,
    index_topk=INDEX_TOPK,
    tie_word_embeddings=True,
)


@pytest.fixture
def model():
    mx.random.seed(0)
    model = Model(ModelArgs(**FACTS))
    mx.eval(model.parameters())
    return model


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Not trained at all, but weights that a file holds."""
    file = tmp_path_factory.mktemp("zoo") / "seed7.safetensors"
    args = vars(ModelArgs(**FACTS))
    weights = random_indexers(args, 7)
    mx.save_safetensors(
        str(file), {n: w.astype(mx.float16) for n, w in weights.items()}
    )
    return file


def case(kind, trained, seed=0):
    return zoo.Case(kind, seed, None if kind == "random" else trained)


def tokens():
    return mx.random.randint(0, 100, (1, TOKENS), key=mx.random.key(1))


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_one_call_and_one_token_at_a_time_agree(kind, model, trained):
    zoo.make(model, case(kind, trained))
    whole = model(tokens(), cache=make_prompt_cache(model))
    cache = make_prompt_cache(model)
    steps = [model(tokens()[:, n : n + 1], cache=cache) for n in range(TOKENS)]
    assert mx.allclose(whole, mx.concatenate(steps, axis=1), atol=1e-4)


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_every_layer_is_probed_and_every_arm_differs(kind, model, trained):
    zoo.make(model, case(kind, trained))
    with mlx_sinks.probe(model, mlx_sinks.SinkPolicy(2, 3), block=10) as recording:
        model(tokens(), cache=make_prompt_cache(model))
    assert recording.metric("mass").shape == (LAYERS, 3)
    assert not np.isnan(recording.metric("mass")).any()
    logits = {}
    for arm, context in arms(model, mlx_sinks.SinkPolicy(2, 3)).items():
        with context():
            logits[arm] = model(tokens(), cache=make_prompt_cache(model))
    assert not mx.allclose(logits["stock"], logits["sinks"], atol=1e-4)
    assert not mx.allclose(logits["stock"], logits["dense"], atol=1e-4)


def test_what_each_kind_is(model, trained):
    held = {n: w.astype(mx.float32) for n, w in mx.load(str(trained)).items()}
    name = "model.layers.5.self_attn.indexer.wk.weight"

    def made(kind, seed=0):
        zoo.make(model, case(kind, trained, seed))
        return [layer.self_attn.indexer for layer in model.layers]

    first, other = (made("random", seed)[5].wk.weight for seed in (0, 1))
    assert not mx.allclose(first, other)
    healthy = made("trained")
    assert mx.array_equal(healthy[5].wk.weight, held[name])
    assert not healthy[5].rope.traditional
    flipped = made("RoPE flipped")
    assert mx.array_equal(flipped[5].wk.weight, held[name])
    assert all(indexer.rope.traditional for indexer in flipped)
    assert all(
        isinstance(part, nn.QuantizedLinear) and part.bits == 4
        for indexer in made("4-bit")
        for part in (indexer.wk, indexer.wq_b, indexer.weights_proj)
    )
    # One that chose nothing hasn't spoilt the next: each is made from the file.
    assert mx.array_equal(made("trained")[5].wk.weight, held[name])


def test_four_layers_share_one_selection(model, trained):
    zoo.make(model, case("shared by four", trained))
    seen = []
    with (
        mlx_sinks.patched(mlx_sinks.SinkPolicy(0, 0)),
        watching(lambda scores, *_: seen.append(scores)),
    ):
        model(tokens(), cache=make_prompt_cache(model))
    own = {id(indexer) for indexer in indexers(model)}
    assert len(seen) == LAYERS / zoo.SHARED_BY == len(own)


def test_a_case_is_told_apart_by_its_weights(trained, tmp_path):
    other = tmp_path / trained.name
    other.write_bytes(trained.read_bytes() + b"x")
    assert case("4-bit", trained).digest() != case("4-bit", other).digest()
    assert case("random", trained).digest() is None
    assert str(case("random", trained, 3)) == "random, seed 3"
    assert str(case("4-bit", trained)) == "4-bit, seed7"
