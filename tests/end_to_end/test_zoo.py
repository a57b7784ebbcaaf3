"""The zoo's kinds of indexers are what their names say, on a model in miniature."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models import glm_moe_dsa, llama
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.deepseek_v32 import Indexer, ModelArgs

import mlx_sinks
from mlx_sinks.sparse.selection import watching
from smollm2 import zoo
from smollm2.build import Recipe
from smollm2.indexers import (
    flipped,
    in_model,
    new_students,
    save_trained,
    trained_indexers,
)
from smollm2.mla import KINDS
from tools.arms import arms
from tools.texts import difference, logits

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
    max_position_embeddings=64,
    rope_theta=10000.0,
    tie_word_embeddings=True,
)
CONFIG = Recipe(index_topk=INDEX_TOPK).config(FACTS)


def new_llama(seed=0, **facts):
    """Of random weights, those of its norms included."""
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs.from_dict({**FACTS, **facts}))
    weights = dict(tree_flatten(model.parameters()))
    norms = [name for name in weights if "norm" in name]
    model.load_weights(
        [(name, mx.random.uniform(0.2, 2, weights[name].shape)) for name in norms],
        strict=False,
    )
    mx.eval(model.parameters())
    return model


@pytest.fixture(scope="module")
def animals():
    return zoo.Zoo(new_llama(), INDEX_TOPK)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Not trained at all, but weights that a file holds."""
    file = tmp_path_factory.mktemp("zoo") / "seed7.safetensors"
    save_trained(file, new_students(CONFIG, 7))
    return file


def case(kind, trained, seed=0):
    return zoo.Case(kind, seed, None if kind == "random" else trained)


def tokens():
    return mx.random.randint(0, 100, (1, TOKENS), key=mx.random.key(1))


def indexers(model):
    return [layer.self_attn.indexer for layer in model.layers]


@settings(deadline=None, max_examples=30)
@given(
    groups=st.integers(1, 3),
    heads_of_a_group=st.integers(1, 3),
    dims=st.sampled_from([16, 32]),
    theta=st.sampled_from([1e4, 1e5]),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 99),
)
def test_every_llama_is_a_deepseek_model_too(
    groups, heads_of_a_group, dims, theta, kind, seed
):
    """To rounding, in one step and one by one."""
    heads = groups * heads_of_a_group
    facts = dict(
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        hidden_size=heads * dims,
        rope_theta=theta,
    )
    theirs = new_llama(seed, **facts)
    ours = zoo.Zoo(theirs, index_topk=64).model(Recipe(kind, index_topk=64), {})
    ids = tokens()[0].tolist()
    expected = logits(theirs, ids, TOKENS)
    for size in (TOKENS, 7, 1):
        assert difference(logits(ours, ids, size), expected) < 1e-4


def test_a_student_scores_as_upstream_does_with_its_weights():
    """What is learnt is what is run: dims of zero change nothing."""
    (student, *_) = new_students(CONFIG, 3)
    student.k_norm.weight = mx.random.normal(student.k_norm.weight.shape)
    student.k_norm.bias = mx.random.normal(student.k_norm.bias.shape)
    indexer = Indexer(ModelArgs.from_dict(CONFIG))
    indexer.load_weights([*student.padded().items()])
    x, rows = mx.random.normal((TOKENS, 64)), mx.array([0, 3, 17, TOKENS - 1])
    seen = []
    with (
        mlx_sinks.patched(mlx_sinks.SinkPolicy(0, 0), ["dsa"]),
        watching(lambda scores, *_: seen.append(scores)),
    ):
        indexer(x[None], x[None], None)
    ours = student(x, rows)
    assert mx.abs(ours).max() > 0.1
    assert mx.allclose(seen[0][0, 0][rows], ours, atol=1e-4)


def test_what_is_saved_is_what_is_loaded_but_for_six_bits(trained):
    found = trained_indexers(CONFIG, trained)
    for number, student in enumerate(new_students(CONFIG, 7)):
        for name, weight in in_model(number, student.padded()).items():
            step = 2.1 * mx.abs(weight).max() / 2**6  # the range has an uneven edge
            assert mx.abs(found.pop(name) - weight).max() <= step
    assert not found


def test_weights_of_another_model_are_refused(trained, tmp_path):
    shallow = Recipe().config({**FACTS, "num_hidden_layers": 7})
    wide = Recipe().config({**FACTS, "hidden_size": 128})
    for config in (shallow, wide):
        with pytest.raises(ValueError, match="no file of train_indexer"):
            trained_indexers(config, trained)


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_one_call_and_one_token_at_a_time_agree(kind, animals, trained):
    model = animals.make(case(kind, trained))
    whole = model(tokens(), cache=make_prompt_cache(model))
    cache = make_prompt_cache(model)
    steps = [model(tokens()[:, n : n + 1], cache=cache) for n in range(TOKENS)]
    assert mx.allclose(whole, mx.concatenate(steps, axis=1), atol=1e-3)


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_every_layer_is_probed_and_every_arm_differs(kind, animals, trained):
    model = animals.make(case(kind, trained))
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


def test_what_each_kind_is(animals, trained):
    held = trained_indexers(CONFIG, trained)
    name = "model.layers.5.self_attn.indexer.wk.weight"

    def made(kind, seed=0):
        return indexers(animals.make(case(kind, trained, seed)))

    first, other = (made("random", seed)[5].wk.weight for seed in (0, 1))
    assert not mx.allclose(first, other)
    assert mx.array_equal(made("trained")[5].wk.weight, held[name])
    swapped = made("RoPE flipped")[5].wk.weight
    assert not mx.array_equal(swapped, held[name])
    assert mx.array_equal(mx.sort(swapped, axis=0), mx.sort(held[name], axis=0))
    coarse = made("4-bit")[5].wk.weight[0]
    assert len({*coarse.tolist()}) <= 16 < len({*held[name][0].tolist()})
    # One that chose nothing hasn't spoilt the next: each is made from the file.
    assert mx.array_equal(made("trained")[5].wk.weight, held[name])


def test_flipped_rows_score_as_the_others_when_neighbours_rotate(trained):
    """That is what the other convention is; by halves they score otherwise."""
    held = trained_indexers(CONFIG, trained)
    names = [
        f"model.layers.0.self_attn.indexer.{part}.weight" for part in ("wq_b", "wk")
    ]
    dims = CONFIG["index_head_dim"]

    def scores(weights, traditional):
        x = mx.random.normal((9, 64), key=mx.random.key(2))
        rotated = (
            mx.fast.rope(
                (x @ weights[name].T).reshape(1, 9, -1, dims).swapaxes(1, 2),
                dims,
                traditional=traditional,
                base=None,
                scale=1.0,
                offset=0,
                freqs=mx.arange(1, dims // 2 + 1).astype(mx.float32),
            )
            for name in names
        )
        queries, keys = rotated
        return queries @ keys.swapaxes(-1, -2)

    other = flipped(CONFIG, held)
    assert mx.allclose(scores(other, True), scores(held, False), atol=1e-4)
    assert not mx.allclose(scores(other, False), scores(held, False), atol=1e-1)


def test_four_layers_share_one_selection(animals, trained):
    model = animals.make(case("shared by four", trained))
    assert isinstance(model, glm_moe_dsa.Model)
    seen = []
    with (
        mlx_sinks.patched(mlx_sinks.SinkPolicy(0, 0)),
        watching(lambda scores, *_: seen.append(scores)),
    ):
        model(tokens(), cache=make_prompt_cache(model))
    own = [part for part in indexers(model) if isinstance(part, Indexer)]
    assert len(seen) == LAYERS / 4 == len(own)


def test_made_up_indexers_are_random_where_layers_should_share(animals, trained):
    held = trained_indexers(CONFIG, trained)
    for number, indexer in enumerate(
        indexers(animals.make(case("shared, made up", trained)))
    ):
        name = f"model.layers.{number}.self_attn.indexer.wk.weight"
        assert mx.array_equal(indexer.wk.weight, held[name]) == (number % 4 == 0)


def test_a_case_is_told_apart_by_its_weights(trained, tmp_path):
    other = tmp_path / trained.name
    other.write_bytes(trained.read_bytes() + b"x")
    assert case("4-bit", trained).digest() != case("4-bit", other).digest()
    assert case("random", trained).digest() is None
    assert str(case("random", trained, 3)) == "random, seed 3"
    assert str(case("4-bit", trained)) == "4-bit, seed7"
