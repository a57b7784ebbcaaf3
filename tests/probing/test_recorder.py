"""A probe on running models: it disturbs nothing, and what it records is true."""

import functools
import json
from copy import deepcopy

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import deepseek_v32
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import BatchKVCache, CacheList, KVCache, make_prompt_cache

import dense_oracle
import mlx_sinks
import processes
import reference
import small_models
from batches import alone_tokens, batch_tokens
from mlx_sinks import ProbeError, Recording, SinkPolicy
from mlx_sinks.patches import registry
from mlx_sinks.probing.coverage import METRICS
from mlx_sinks.sparse.selection import is_watched
from small_models import tokens as prompt

UPSTREAM = deepseek_v32.Indexer.__call__
TOPK, POLICY = small_models.INDEX_TOPK, SinkPolicy(2, 3)
make = functools.partial(small_models.make, **small_models.MANY_HEADS)


@pytest.fixture(params=small_models.KINDS)
def model(request):
    return make(request.param, seed=3)


@pytest.fixture
def one_model():
    """Where the kind doesn't matter."""
    return make(seed=3)


def feed(model, tokens, chunk=None, cache=None):
    """The logits (L, vocab) of one sequence, ``chunk`` tokens a call."""
    chunk = chunk or len(tokens)
    cuts = [chunk] * -(-len(tokens) // chunk)
    return small_models.logits(model, tokens, cuts, cache)


def feed_together(model, prompts, chunk=None):
    """A left-padded batch."""
    T = max(map(len, prompts))
    padding = [T - len(tokens) for tokens in prompts]
    cache = [
        CacheList(BatchKVCache(padding), BatchKVCache(padding)) for _ in model.layers
    ]
    tokens = mx.array([[0] * f + p for f, p in zip(padding, prompts)])
    for start in range(0, T, chunk or T):
        mx.eval(model(tokens[:, start : start + (chunk or T)], cache=cache))


def recorded(model, *texts, chunk=None, **options):
    with mlx_sinks.probe(model, POLICY, **options) as recording:
        for tokens in texts:
            feed(model, tokens, chunk)
    return recording


def attention_modules(model):
    return [layer.self_attn for layer in model.layers]


def same_figures(one, other, close=1e-4):
    assert one.layers == other.layers
    assert one.blocks == other.blocks
    assert one.queries == other.queries
    for name in METRICS:
        np.testing.assert_allclose(
            one.metric(name), other.metric(name), rtol=0, atol=close, err_msg=name
        )


def looked_at(monkeypatch):
    """The (layer, position) of each query that recordings are given from here on."""
    add, seen = Recording.add, []

    def watched(self, layer, position, figures):
        seen.append((layer, position))
        return add(self, layer, position, figures)

    monkeypatch.setattr(Recording, "add", watched)
    return seen


# ---------------------------------------------------------------- the oracle


def hidden_states(model, tokens):
    """What each layer's attention is called with, (L, D) each."""
    h = model.model.embed_tokens(mx.array([tokens]))
    mask, inputs = create_causal_mask(len(tokens)), []
    for layer in model.layers:
        inputs.append(np.array(layer.input_layernorm(h)[0]).astype(np.float64))
        h = layer(h, mask, None)
    return inputs


def expected_figures(scores, weight, policy):
    """Of a query that sees all T columns, or None where scores tie at the threshold.

    ``weight`` (T,) is dense attention averaged over heads.
    """
    T = len(scores)
    sinks, recent = set(range(policy.sinks)), set(range(T - policy.recency, T))
    forced, everything = sinks | recent, set(range(T))

    def best(values, k, among):
        order = sorted(among, key=lambda c: -values[c])
        tied = values[order[k - 1]] - values[order[k]] < 1e-5
        return None if tied else set(order[:k])

    alone = best(scores, TOPK, everything)
    rest = best(scores, TOPK - len(forced), everything - forced)
    if alone is None or rest is None:
        return None
    return {
        "sinks_kept": len(alone & sinks) / len(sinks),
        "recency_kept": len(alone & recent) / len(recent),
        "mass": sum(weight[c] for c in alone),
        "mass_guaranteed": sum(weight[c] for c in forced | rest),
        "mass_best": sum(sorted(weight)[-TOPK:]),
        "mass_chance": TOPK / T,
    }


# ---------------------------------------------------------------- nothing is disturbed


def modes():
    return pytest.mark.parametrize("policy", [None, POLICY], ids=["stock", "patched"])


@modes()
@pytest.mark.parametrize("chunk", [1, 7, None])
def test_logits_are_those_without_a_probe(model, policy, chunk):
    tokens = prompt(0, 50)
    if policy:
        mlx_sinks.install(policy)
    expected = feed(model, tokens, chunk)
    with mlx_sinks.probe(model, SinkPolicy(1, 1), block=8, queries=3) as recording:
        np.testing.assert_array_equal(feed(model, tokens, chunk), expected)
    assert recording.queries
    np.testing.assert_array_equal(feed(model, tokens, chunk), expected)


@modes()
def test_generated_tokens_are_those_without_a_probe(model, policy):
    if policy:
        mlx_sinks.install(policy)
    prompts = [prompt(seed, length) for seed, length in enumerate((5, 40, 23))]

    def generated():
        together, _ = batch_tokens(model, prompts, None, 12, prefill_step_size=9)
        return together, alone_tokens(model, prompts[1], None, 12, prefill_step_size=9)

    expected = generated()
    with mlx_sinks.probe(model, POLICY, block=8, queries=3):
        assert generated() == expected


def test_the_policy_in_force_is_the_one_that_the_model_runs_with(model):
    """The probe's own policy is for what it reports, and for nothing else."""
    tokens = prompt(0, 60)
    stock = feed(model, tokens)
    with mlx_sinks.patched(POLICY):
        forced = feed(model, tokens)
        with mlx_sinks.probe(model, SinkPolicy(8, 8)) as around:
            np.testing.assert_array_equal(feed(model, tokens), forced)
    with mlx_sinks.probe(model, SinkPolicy(8, 8)) as recording:
        with mlx_sinks.patched(POLICY):
            np.testing.assert_array_equal(feed(model, tokens), forced)
        np.testing.assert_array_equal(feed(model, tokens), stock)
    assert around.policy == recording.policy == SinkPolicy(8, 8)
    assert not np.array_equal(stock, forced)


def test_a_model_with_a_policy_of_its_own_keeps_it(one_model):
    tokens = prompt(0, 60)
    mlx_sinks.apply(one_model, POLICY)
    expected = feed(one_model, tokens)
    with mlx_sinks.probe(one_model, SinkPolicy(1, 1)):
        np.testing.assert_array_equal(feed(one_model, tokens), expected)
    np.testing.assert_array_equal(feed(one_model, tokens), expected)


@pytest.mark.parametrize("ends", ["well", "with an exception"])
def test_everything_is_as_it_was_afterwards(model, ends):
    modules = attention_modules(model)
    classes = [type(module) for module in modules]
    contents = [dict(vars(module)) for module in modules]
    try:
        with mlx_sinks.probe(model, POLICY):
            feed(model, prompt(0, 30))
            if ends != "well":
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert [type(module) for module in modules] == classes
    assert [dict(vars(module)) for module in modules] == contents
    assert deepseek_v32.Indexer.__call__ is UPSTREAM
    assert not is_watched()


def test_a_call_that_fails_leaves_the_probe_recording(one_model):
    """And the thread not: the failed call's watcher is gone."""
    tokens = prompt(0, 40)
    expected = recorded(one_model, tokens)
    with mlx_sinks.probe(one_model, POLICY) as recording:
        broken = [CacheList(KVCache(), None) for _ in one_model.layers]
        with pytest.raises(AttributeError):  # after the selection
            one_model(mx.array([tokens]), cache=broken)
        assert not is_watched()
        feed(one_model, tokens)
    same_figures(recording, expected, close=0)


def test_an_install_inside_the_block_outlives_it(one_model):
    with mlx_sinks.probe(one_model, POLICY):
        mlx_sinks.install(POLICY)
    assert deepseek_v32.Indexer.__call__ is not UPSTREAM
    assert registry.patch_of("dsa")._policy == POLICY


def test_an_uninstall_inside_the_block_is_survived(one_model):
    tokens = prompt(0, 40)
    stock = feed(one_model, tokens)
    with mlx_sinks.probe(one_model, POLICY):
        mlx_sinks.uninstall()
        np.testing.assert_array_equal(feed(one_model, tokens), stock)
    assert deepseek_v32.Indexer.__call__ is UPSTREAM


def test_reached_patches_with_nothing_to_force(one_model):
    tokens = prompt(0, 40)
    stock = feed(one_model, tokens)
    with registry.reached(one_model):
        assert deepseek_v32.Indexer.__call__ is not UPSTREAM
        np.testing.assert_array_equal(feed(one_model, tokens), stock)
    assert deepseek_v32.Indexer.__call__ is UPSTREAM
    with mlx_sinks.patched(POLICY):
        with registry.reached(one_model):
            assert registry.patch_of("dsa")._policy == POLICY
        assert registry.patch_of("dsa")._policy == POLICY


# ---------------------------------------------------------------- what is recorded


def test_every_position_against_the_oracle(model):
    tokens, config, causal = prompt(5, 60), dense_oracle.facts(model), np.tri(60) > 0
    expected = {}
    for layer in model.layers:
        # mlx-lm has 1e-5 here.
        layer.self_attn.indexer.k_norm.eps = reference.INNER_EPS
    inputs = hidden_states(model, tokens)
    for number, (attention, x) in enumerate(zip(attention_modules(model), inputs)):
        weights = dense_oracle.attention(attention, config, x, causal).mean(axis=0)
        scores = dense_oracle.index_scores(attention, config, x)
        for p in range(TOPK, 60):
            expected[number, p] = expected_figures(
                scores[p, : p + 1], weights[p, : p + 1], POLICY
            )
    recording = recorded(model, tokens, block=1, queries=1)
    assert recording.blocks == list(range(TOPK, 60))
    assert recording.queries == len(expected)
    known = [key for key, figures in expected.items() if figures]
    assert len(known) > 0.8 * len(expected)
    for name in METRICS:
        got = recording.metric(name)
        assert got.shape == (len(model.layers), 60 - TOPK)
        np.testing.assert_allclose(
            [got[number, p - TOPK] for number, p in known],
            [expected[key][name] for key in known],
            rtol=0,
            atol=1e-4,
            err_msg=name,
        )


@pytest.mark.parametrize(("lengths", "chunk"), [([60], 1), ([60], 5), ([57, 40], 1)])
def test_the_cut_into_calls_does_not_matter(model, lengths, chunk):
    """What an earlier sequence chose from is no longer of interest."""
    texts = [prompt(seed, length) for seed, length in enumerate(lengths, 1)]
    whole, cut = (
        recorded(model, *texts, chunk=size, block=8, queries=3)
        for size in (None, chunk)
    )
    same_figures(cut, whole)


@pytest.mark.parametrize("chunk", [1, 7])
def test_a_left_padded_batch_is_its_sequences(model, chunk):
    """One much shorter, and one that never leaves anything out."""
    prompts = [prompt(seed, n) for seed, n in enumerate((60, 37, 21, TOPK))]
    alone = recorded(model, *prompts, block=8, queries=3)
    with mlx_sinks.probe(model, POLICY, block=8, queries=3) as together:
        feed_together(model, prompts, chunk)
    same_figures(together, alone)


def test_generated_tokens_are_looked_at_as_prompts_are(model):
    p = prompt(2, 20)
    with mlx_sinks.probe(model, POLICY, block=4, queries=4) as as_generated:
        answer = alone_tokens(model, p, None, 21)
    as_prompt = recorded(model, p + answer[:-1], block=4, queries=4)
    assert as_prompt.blocks == [16, 20, 24, 28, 32, 36]
    for name in METRICS:
        np.testing.assert_allclose(
            # Upstream may have computed one token more than it gave out.
            as_generated.metric(name)[:, :6],
            as_prompt.metric(name),
            atol=1e-4,
        )


def test_the_guarantee_in_force_does_not_change_what_the_scores_alone_choose(one_model):
    """In the first layer, which sees the same hidden states under any policy."""
    tokens = prompt(3, 60)
    stock = recorded(one_model, tokens, block=8)
    with mlx_sinks.patched(SinkPolicy(4, 8)):
        forced = recorded(one_model, tokens, block=8)
    for name in METRICS:
        np.testing.assert_allclose(
            forced.metric(name)[0], stock.metric(name)[0], atol=1e-4
        )


def test_nothing_is_recorded_while_all_tokens_fit(model):
    with mlx_sinks.probe(model, POLICY, block=1, queries=1) as recording:
        feed(model, prompt(0, TOPK))
        feed_together(model, [prompt(0, TOPK), prompt(1, 4)])
        assert recording.blocks == []
        assert recording.queries == 0
        with pytest.raises(ProbeError, match=f"index_topk={TOPK} .* a longer text"):
            recording.metric("mass")
        with pytest.raises(ProbeError, match="a longer text"):
            recording.plot()
        with pytest.raises(ValueError, match="'masses' is not a metric .*mass_best"):
            recording.metric("masses")
        feed(model, prompt(0, TOPK + 1))
    assert recording.blocks == [TOPK]
    assert recording.queries == len(model.layers)


@pytest.mark.parametrize(
    ("block", "queries"), [(8, 1), (8, 2), (8, 8), (10, 4), (7, 3), (64, 5)]
)
def test_evenly_spaced_queries(monkeypatch, block, queries):
    model, seen = make(index_topk=8), looked_at(monkeypatch)
    with mlx_sinks.probe(model, SinkPolicy(1, 1), block=block, queries=queries) as r:
        feed(model, prompt(0, 80))
    assert r.queries == len(seen) == len(set(seen))
    by_layer = [[p for layer, p in seen if layer == number] for number in (0, 1)]
    assert sorted(by_layer[0]) == sorted(by_layer[1])
    positions = sorted(by_layer[0])
    assert positions[0] >= 8
    assert r.blocks == sorted({p - p % block for p in positions})
    for start in range(0, 80 - block + 1, block):
        inside = [p for p in positions if start <= p < start + block]
        if start >= 8:
            assert len(inside) == queries
    gaps = set(np.diff(positions).tolist())
    assert max(gaps) - min(gaps) <= 1


def test_a_block_is_the_average_of_its_queries(one_model, monkeypatch):
    tokens = prompt(4, 64)
    single = recorded(one_model, tokens, block=1, queries=1)
    seen = looked_at(monkeypatch)
    blocks = recorded(one_model, tokens, block=16, queries=4)
    for number in range(len(one_model.layers)):
        for place, start in enumerate(blocks.blocks):
            mine = [
                single.blocks.index(p)
                for layer, p in seen
                if layer == number and start <= p < start + 16
            ]
            for name in METRICS:
                assert blocks.metric(name)[number, place] == pytest.approx(
                    single.metric(name)[number, mine].mean(), abs=1e-5
                )


def test_a_recording_can_be_read_while_it_grows(one_model):
    cache, tokens = make_prompt_cache(one_model), prompt(0, 90)
    with mlx_sinks.probe(one_model, POLICY, block=10, queries=2) as recording:
        counts = []
        for start in range(0, 90, 30):
            feed(one_model, tokens[start : start + 30], cache=cache)
            counts.append(recording.queries)
            assert recording.metric("mass").shape == (2, len(recording.blocks))
    assert counts[0] < counts[1] < counts[2]
    feed(one_model, tokens)
    assert recording.queries == counts[2]


def test_a_recording_knows_what_it_is_of(one_model):
    with mlx_sinks.probe(one_model) as recording:
        pass
    assert recording.layers == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert recording.index_topk == TOPK
    assert recording.policy == SinkPolicy(4, TOPK // 2)
    assert recording.block == 256


def test_a_call_without_a_cache_is_a_sequence_from_its_start_on(model):
    tokens = prompt(1, 40)
    cached = recorded(model, tokens, block=8)
    expected = np.array(model(mx.array([tokens])))
    with mlx_sinks.probe(model, POLICY, block=8) as recording:
        np.testing.assert_array_equal(np.array(model(mx.array([tokens]))), expected)
    same_figures(recording, cached)


@pytest.mark.parametrize(
    "options", [dict(dtype=mx.bfloat16), dict(bits=4)], ids=["bfloat16", "4 bits"]
)
def test_other_weights(options):
    recording = recorded(make(**options), prompt(0, 60), block=16, queries=4)
    figures = {name: recording.metric(name) for name in METRICS}
    assert np.isfinite(list(figures.values())).all()
    assert (figures["mass"] <= figures["mass_best"] + 1e-5).all()


def test_layers_that_share_a_selection_are_looked_at_too():
    mlx_sinks.install(SinkPolicy(4, 6))
    model, figures = make("glm_moe_dsa", **small_models.glm52(7)), []
    for cached in (True, False):
        with mlx_sinks.probe(model, SinkPolicy(4, 6), block=8, queries=8) as recording:
            cache = model.make_cache() if cached else None
            mx.eval(model(mx.array([prompt(0, 40)]), cache))
        assert len(recording.layers) == 7
        figures.append(recording.metric("mass"))
    np.testing.assert_allclose(*figures, atol=1e-5)


def test_a_recording_averages_by_block_and_is_nan_where_unseen():
    recording = Recording(["a", "b", "c"], 16, POLICY, 4)
    added = [(0, 16, 0.2), (1, 16, 0.4), (1, 20, 0.6), (0, 19, 0.8)]
    for layer, position, mass in added:
        figures = [mass if name == "mass" else 0.5 for name in METRICS]
        recording.add(layer, position, np.array(figures))
    assert recording.blocks == [16, 20]
    assert recording.queries == 4
    np.testing.assert_allclose(
        recording.metric("mass"), [[0.5, np.nan], [0.4, 0.6], [np.nan, np.nan]]
    )


# ---------------------------------------------------------------- what is refused


def test_a_model_that_selects_nowhere():
    tiny_llama = small_models.make_llama()
    with (
        pytest.raises(ValueError, match="Model has no layer that mlx-sinks patches"),
        mlx_sinks.probe(tiny_llama, POLICY),
    ):
        pass
    with pytest.raises(ValueError, match=r"\w+ \w+"), registry.reached(tiny_llama):
        pass
    assert deepseek_v32.Indexer.__call__ is UPSTREAM


def test_a_layer_that_cannot_be_observed(one_model):
    class Wrapped(deepseek_v32.DeepseekV32Attention):
        def __call__(self, *args, **options):
            return super().__call__(*args, **options)

    modules = attention_modules(one_model)
    modules[1].__class__ = Wrapped
    with pytest.raises(ProbeError), mlx_sinks.probe(one_model, POLICY):
        pass
    assert type(modules[0]) is deepseek_v32.DeepseekV32Attention
    assert type(modules[1]) is Wrapped
    assert deepseek_v32.Indexer.__call__ is UPSTREAM


@pytest.mark.parametrize(
    "options",
    [dict(queries=0), dict(queries=-1), dict(queries=9, block=8), dict(block=0)],
    ids=str,
)
def test_counts_that_cannot_be(one_model, options):
    with pytest.raises(ValueError), mlx_sinks.probe(one_model, POLICY, **options):
        pass
    assert deepseek_v32.Indexer.__call__ is UPSTREAM


def test_a_policy_that_does_not_fit_the_model(one_model):
    with (
        pytest.raises(ValueError, match=f"sinks={TOPK}"),
        mlx_sinks.probe(one_model, SinkPolicy(TOPK, 1)),
    ):
        feed(one_model, prompt(0, 40))
    assert deepseek_v32.Indexer.__call__ is UPSTREAM


def test_a_second_probe_on_a_model_is_refused_and_the_first_unharmed(one_model):
    tokens = prompt(0, 40)
    expected = recorded(one_model, tokens)
    with mlx_sinks.probe(one_model, POLICY) as recording:
        with pytest.raises(ProbeError), mlx_sinks.probe(one_model, POLICY):
            pass
        feed(one_model, tokens)
    same_figures(recording, expected, close=0)
    same_figures(recorded(one_model, tokens), expected, close=0)


# ---------------------------------------------------------------- who sees whom


def test_two_probed_models_in_one_thread():
    models = [make(kind, seed=seed) for seed, kind in enumerate(small_models.KINDS)]
    texts = [prompt(0, 40), prompt(1, 60)]
    alone = [recorded(*pair, block=8) for pair in zip(models, texts)]
    with (
        mlx_sinks.probe(models[0], POLICY, block=8) as first,
        mlx_sinks.probe(models[1], POLICY, block=8) as second,
    ):
        for model, tokens in zip(models, texts):
            feed(model, tokens)
    same_figures(first, alone[0], close=0)
    same_figures(second, alone[1], close=0)


TWO_THREADS = """
import json, os, threading
import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
import mlx_sinks, small_models

models = [small_models.make(seed=seed) for seed in (0, 1)]
turns, masses = [threading.Semaphore(), threading.Semaphore(0)], [{}, {}]

def probed(number, alone):
    with mlx_sinks.probe(models[number], mlx_sinks.SinkPolicy(2, 3), block=8) as seen:
        cache = make_prompt_cache(models[number])
        for start in range(0, 60 - 20 * number, 10):
            alone or turns[number].acquire()
            tokens = mx.arange(start, start + 10)[None] + number
            mx.eval(models[number](tokens, cache=cache))
            alone or turns[1 - number].release()
    masses[number][alone] = [seen.queries, seen.metric("mass").tolist()]

for number in (0, 1):
    probed(number, True)

def other():
    probed(1, False)
    turns[0].release(2)
    threading.Event().wait()

threading.Thread(target=other, daemon=True).start()
probed(0, False)
turns[0].acquire()
print(json.dumps([[mass[True], mass[False]] for mass in masses]), flush=True)
os._exit(0)
"""


def test_two_models_in_two_threads_do_not_see_each_other():
    """By turns, in a process that ends before a thread does: mlx aborts otherwise."""
    outcome = processes.python_beside_tests(TWO_THREADS)
    assert outcome.status == 0, outcome.stderr
    for alone, together in json.loads(outcome.stdout):
        assert alone[0] == together[0] > 0
        np.testing.assert_allclose(together[1], alone[1], atol=1e-5)


def test_an_unprobed_model_is_not_seen():
    probed, other = make(seed=0), make(seed=1)
    with mlx_sinks.probe(probed, POLICY) as recording:
        feed(other, prompt(0, 40))
    assert recording.queries == 0


def test_a_copy_made_inside_is_not_probed(one_model):
    with mlx_sinks.probe(one_model, POLICY) as recording:
        copied = deepcopy(one_model)
        copied(mx.array([prompt(0, 60)]))
        assert recording.queries == 0
    with mlx_sinks.patched(POLICY):
        copied(mx.array([prompt(0, 60)]))
    assert recording.queries == 0


def test_a_layer_that_chose_nothing_is_not_shown_another_s_choice(one_model):
    """Here the second one keeps everything: there is nothing to look at."""
    second = one_model.model.layers[1].self_attn.indexer
    second.index_topk, before = 1000, second.index_topk
    try:
        with mlx_sinks.probe(one_model, POLICY, queries=256) as recording:
            one_model(mx.array([prompt(0, 60)]))
    finally:
        second.index_topk = before
    seen = ~np.isnan(recording.metric("mass")).all(axis=1)
    assert seen.tolist() == [True, False]
