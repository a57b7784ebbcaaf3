"""Compacted prompts against NumPy: which rows stay, and what is decoded from them."""

import contextlib
import copy
import functools
import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mlx_lm import stream_generate
from mlx_lm.generate import generate_step
from mlx_lm.models import base, llama
from mlx_lm.models.cache import (
    KVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

import mlx_sinks
import processes
import small_models
import window_oracle
from batch_histories import BatchHistory, hold, merged
from batches import alone_tokens, batched_turns
from mlx_sinks import (
    BatchCompactCache,
    CompactCache,
    CompactPromptCache,
    snapkv_keep_indices,
)
from mlx_sinks.budgets.snapkv import SnapKV, window_scores

HEADS, GROUP, WIDTH, VOCABULARY = 2, 2, 16, 97
ROW = 2 * HEADS * WIDTH * 4
NOISE = dict(rtol=1e-3, atol=2e-4)
SMALL = dict(budget=16, min_tokens=0)


def compact_prompt_cache(
    model,
    prompt,
    prompt_cache=None,
    prefill_step_size=2048,
    prompt_progress_callback=None,
    **facts,
):
    """The public function, with the settings of its method one by one."""
    return mlx_sinks.compact_prompt_cache(
        model,
        prompt,
        SnapKV(**facts),
        prompt_cache=prompt_cache,
        prefill_step_size=prefill_step_size,
        prompt_progress_callback=prompt_progress_callback,
    )


def make_model(seed=0, **facts):
    shape = dict(
        hidden_size=HEADS * GROUP * WIDTH,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS * GROUP,
        num_key_value_heads=HEADS,
        vocab_size=VOCABULARY,
        max_position_embeddings=2048,
    )
    return small_models.make_llama(seed, **{**shape, **facts})


@functools.cache
def shared_model():
    return make_model()


def hybrid_model():
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return make_model(num_hidden_layers=3, layer_types=kinds, sliding_window=8)


def tokens(seed, length):
    rng = np.random.default_rng(seed)
    return mx.array(rng.integers(0, VOCABULARY, length))


def step(model, inputs, cache):
    """Logits (length, vocabulary) of one call."""
    out = np.array(model(inputs[None], cache)[0])
    mx.eval([layer.state for layer in cache])
    return out


def logits(model, inputs, cuts, cache):
    assert sum(cuts) == len(inputs)
    ends = np.cumsum(cuts).tolist()
    return np.concatenate(
        [step(model, inputs[end - cut : end], cache) for cut, end in zip(cuts, ends)]
    )


class Whole(KVCache):
    """All rows there ever were; each kv head sees those of them that are alive."""

    def __init__(self, heads=HEADS):
        super().__init__()
        self.alive = np.ones((heads, 0), bool)
        self.queries = self.scale = None

    def seen(self):
        newer = self.offset - self.alive.shape[1]
        return np.pad(self.alive, ((0, 0), (0, newer)), constant_values=True)

    def trim(self, n):
        super().trim(n)
        self.alive = self.alive[:, : self.offset]
        return n

    def held(self):
        """The columns, and the rows at them."""
        columns = np.array([np.flatnonzero(head) for head in self.seen()])
        keys, values = (
            np.array(x[0, :, : self.offset]) for x in (self.keys, self.values)
        )
        at = columns[..., None]
        return columns, *(np.take_along_axis(x, at, axis=1) for x in (keys, values))

    def keep(self, columns):
        alive = np.zeros((len(self.alive), self.offset), bool)
        np.put_along_axis(alive, np.asarray(columns), True, axis=1)
        self.alive = alive

    def scores(self, count, kernel):
        """(kv heads, rows held), of the last call's last ``count`` queries."""
        columns, keys, _ = self.held()
        queries = self.queries[:, -count:].astype(np.float64)
        positions = np.arange(self.offset - queries.shape[1], self.offset)
        group, scores = len(queries) // len(keys), []
        for head in range(len(keys)):
            own = queries[head * group : (head + 1) * group]
            dots = own @ keys[head].astype(np.float64).T * self.scale
            causal = columns[head] <= positions[:, None]
            weights = np.exp(np.where(causal, dots, -np.inf))
            weights /= weights.sum(axis=-1, keepdims=True)
            mass = np.pad(weights.sum(axis=1).mean(axis=0), kernel // 2)
            scores.append(
                np.lib.stride_tricks.sliding_window_view(mass, kernel).max(axis=-1)
            )
        return np.array(scores)


def masked_attention(queries, keys, values, cache, scale, mask, **named):
    if not isinstance(cache, Whole):
        return base.scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=scale, mask=mask, **named
        )
    cache.queries, cache.scale = np.array(queries[0]), scale
    rows, columns = queries.shape[2], keys.shape[2]
    seen = cache.seen()[:, None] & np.tri(rows, columns, columns - rows, dtype=bool)
    seen = np.repeat(seen, queries.shape[1] // keys.shape[1], axis=0)
    # The oracle scales by the width.
    queries = queries * (scale * queries.shape[-1] ** 0.5)
    arrays = (np.array(x) for x in (queries, keys, values))
    return mx.array(window_oracle.attend(*arrays, seen).astype(np.float32))


def undecided(scores, kept):
    """Whether rounding could choose otherwise; equal scores are no such matter."""
    dropped = np.delete(scores, kept)
    if not len(dropped):
        return False
    best = dropped.max()
    return bool(((scores != best) & (abs(scores - best) <= 1e-5 * best)).any())


class Reference:
    """Every token kept, with dropped rows masked out in NumPy."""

    def __init__(self, model, prompt=None, layers=None):
        self.model = model
        heads = model.args.num_key_value_heads
        self.layers = layers or [Whole(heads) for _ in model.layers]
        self.decided = True
        self.upstream = sys.modules[type(model).__module__]
        if prompt is not None:
            self.feed(prompt)

    def feed(self, inputs):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                self.upstream, "scaled_dot_product_attention", masked_attention
            )
            return np.array(self.model(inputs[None], self.layers)[0])

    def compact(self, budget, window_size=32, kernel_size=7, **facts):
        """The last call's tokens are the prompt."""
        for layer in self.layers:
            columns, *_ = layer.held()
            kept = []
            for own, scores in zip(columns, layer.scores(window_size, kernel_size)):
                rows = snapkv_keep_indices(len(own), budget, scores, **facts)
                self.decided &= not undecided(scores, list(rows))
                kept.append(own[list(rows)])
            layer.keep(kept)
        return self

    def follow(self, cache):
        """What a cache has kept, whyever."""
        for ours, layer in zip(cache, self.layers):
            layer.keep(columns_of(ours, layer))
        return self

    def trim(self, n):
        for layer in self.layers:
            layer.trim(n)

    def twin(self):
        """It goes on for itself; the model is the same."""
        return Reference(self.model, layers=copy.deepcopy(self.layers))

    def check(self, cache):
        assert self.decided, "a near-tie: take another seed"
        for ours, layer in zip(cache, self.layers):
            check_rows(ours, layer)


def numpy_rows(cache):
    keys, values = cache.rows()
    assert keys.shape == values.shape
    assert (keys.shape[0], keys.shape[2]) == (1, cache.size())
    return np.array(keys[0]), np.array(values[0])


def columns_of(cache, whole):
    """Which of the stock cache's rows are held, found by their keys."""
    (keys, values), found = numpy_rows(cache), []
    every = np.array(whole.keys[0, :, : whole.offset])
    for head in range(len(keys)):
        apart = np.abs(keys[head][:, None] - every[head]).max(axis=-1)
        columns = apart.argmin(axis=-1)
        assert (np.diff(columns) > 0).all()
        assert apart.min(axis=-1).max() < 1e-4
        np.testing.assert_allclose(
            values[head],
            np.array(whole.values[0, head])[columns],
            rtol=1e-4,
            atol=1e-5,
        )
        found.append(columns)
    return np.array(found)


def check_rows(cache, whole):
    columns, keys, values = whole.held()
    np.testing.assert_array_equal(columns_of(cache, whole), columns)
    ours = numpy_rows(cache)
    np.testing.assert_allclose(ours[0], keys, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ours[1], values, rtol=1e-4, atol=1e-5)
    assert (cache.offset, cache.size()) == (whole.offset, columns.shape[1])
    assert cache.dropped == cache.offset - cache.size()


def compacted(length=60, seed=0, model=None, **facts):
    """A compacted prompt, and the reference that has dropped the same rows."""
    model, prompt = model or shared_model(), tokens(seed, length)
    facts = {**SMALL, **facts}
    cache = compact_prompt_cache(model, prompt, **facts)
    return cache, Reference(model, prompt).follow(cache)


def check_decoding(cache, reference, inputs, cuts):
    ours = logits(reference.model, inputs, cuts, cache)
    np.testing.assert_allclose(ours, reference.feed(inputs), **NOISE)


def test_a_prompt_is_compacted_to_its_budget():
    cache = compact_prompt_cache(shared_model(), tokens(0, 300), budget=32)
    assert isinstance(cache, CompactPromptCache) and isinstance(cache, list)
    assert cache.skipped_layers == {}
    assert [type(layer) for layer in cache] == [CompactCache] * 2
    for layer in cache:
        assert (layer.offset, layer.size(), layer.dropped) == (300, 32, 268)
        assert type(layer.offset) is type(layer.size()) is type(layer.dropped) is int
        assert not layer.empty()
        assert 32 * ROW <= layer.nbytes <= (32 + 256) * ROW
        assert layer.is_trimmable()


@pytest.mark.parametrize("prefill", [1, 7, 64, 2048])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_kept_rows_are_those_that_the_last_queries_look_at(prefill, seed):
    model, prompt = shared_model(), tokens(seed, 150)
    cache = compact_prompt_cache(model, prompt, budget=24, prefill_step_size=prefill)
    reference = Reference(model, prompt).compact(24)
    reference.check(cache)
    held = [layer.held()[0] for layer in reference.layers]
    assert all((columns[:, :4] == range(4)).all() for columns in held)
    assert any((columns[0] != columns[1]).any() for columns in held)
    check_decoding(cache, reference, tokens(9, 12), [1] * 12)


def has_room(facts):
    """Whether a budget holds the sinks, the recent rows and one scored row."""
    budget, sinks, recent = map(facts.get, ("budget", "sink_tokens", "recent_tokens"))
    if not facts["guarantee_sinks"]:
        sinks = min(sinks, max(1, budget // 8))
    return budget > sinks + (max(1, budget // 8) if recent is None else recent)


@pytest.mark.parametrize(
    ("facts", "numbers"),
    [
        ({"budget": 2}, "budget=2 has no room: 4 sinks, 1 recent and one scored row"),
        ({"budget": 9, "recent_tokens": 5}, "4 sinks, 5 recent and one scored row are"),
        ({"budget": 20, "sink_tokens": 18}, "18 sinks, 2 recent and one scored row"),
    ],
)
def test_a_budget_without_room_is_refused_with_the_numbers(facts, numbers):
    model, prompt = shared_model(), tokens(0, 30)
    with pytest.raises(mlx_sinks.PolicyError, match=numbers):
        compact_prompt_cache(model, prompt, **facts)
    with pytest.raises(mlx_sinks.PolicyError, match="kv_budget=5 has no room"):
        mlx_sinks.SinkPolicy(kv_budget=5)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_kept_rows_are_those_of_the_contract(data):
    length = data.draw(st.integers(1, 60), "length")
    facts = dict(
        budget=data.draw(st.integers(1, 40), "budget"),
        window_size=data.draw(st.integers(1, 70), "window_size"),
        kernel_size=data.draw(st.sampled_from([1, 3, 5, 7, 31]), "kernel_size"),
        sink_tokens=data.draw(st.integers(0, 6), "sinks"),
        recent_tokens=data.draw(st.one_of(st.none(), st.integers(0, 8)), "recent"),
        min_tokens=data.draw(st.sampled_from([0, 0, 20]), "min_tokens"),
        guarantee_sinks=data.draw(st.booleans(), "guarantee_sinks"),
    )
    prefill = data.draw(st.sampled_from([1, 7, 64, 2048]), "prefill")
    assume(has_room(facts))
    model, prompt = shared_model(), tokens(length, length)
    reference = Reference(model, prompt).compact(**facts)
    assume(reference.decided)
    cache = compact_prompt_cache(model, prompt, prefill_step_size=prefill, **facts)
    reference.check(cache)
    check_decoding(cache, reference, tokens(99, 4), [1, 3])


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_any_number_of_heads_share_their_rows(kv_heads):
    model, prompt = make_model(num_key_value_heads=kv_heads), tokens(1, 60)
    cache = compact_prompt_cache(model, prompt, **SMALL)
    reference = Reference(model, prompt).compact(**SMALL)
    reference.check(cache)
    check_decoding(cache, reference, tokens(2, 6), [1, 1, 4])


OTHER_MODELS = {
    "qwen3": {},
    "granite": dict(
        attention_multiplier=0.6,
        embedding_multiplier=1.5,
        residual_multiplier=0.8,
        logits_scaling=2.0,
        mlp_bias=False,
    ),
    "smollm3": dict(no_rope_layers=[1, 0]),  # its second layer has no positions
}


@pytest.mark.parametrize("kind", OTHER_MODELS)
def test_queries_are_the_layers_own(kind):
    """Normed ones, ones of another scale, and ones without positions."""
    shape = dict(num_key_value_heads=HEADS, head_dim=WIDTH, tie_word_embeddings=True)
    facts = dict(vocab_size=VOCABULARY, **shape, **OTHER_MODELS[kind])
    model, prompt = small_models.make(kind, **facts), tokens(1, 60)
    cache = compact_prompt_cache(model, prompt, prefill_step_size=25, **SMALL)
    assert cache.skipped_layers == {}
    reference = Reference(model)
    if kind == "smollm3":
        # Its attention is llama's.
        reference.upstream = llama
    reference.feed(prompt)
    reference.compact(**SMALL).check(cache)
    check_decoding(cache, reference, tokens(2, 6), [1, 1, 4])


def test_unguarded_sinks_are_capped():
    facts = dict(budget=24, sink_tokens=12, min_tokens=0)
    model, prompt = shared_model(), tokens(3, 150)
    kept = []
    for guarantee in (True, False):
        cache = compact_prompt_cache(model, prompt, guarantee_sinks=guarantee, **facts)
        reference = Reference(model, prompt)
        reference.compact(guarantee_sinks=guarantee, **facts).check(cache)
        kept.append(np.array([layer.held()[0] for layer in reference.layers]))
    assert (kept[0][..., :12] == range(12)).all()
    assert (kept[1][..., :3] == range(3)).all()
    assert (kept[1][..., :12] != range(12)).any()


@pytest.mark.parametrize("prefill", [16, 2048])
def test_kept_rows_are_the_stock_caches_own(prefill):
    model, prompt = shared_model(), tokens(4, 100)
    cache = compact_prompt_cache(model, prompt, prefill_step_size=prefill, **SMALL)
    stock = make_prompt_cache(model)
    for start in range(0, 100, prefill):
        step(model, prompt[start : start + prefill], stock)
    for ours, layer in zip(cache, stock):
        columns_of(ours, layer)


def test_the_dtype_is_the_models():
    model, prompt = make_model(), tokens(5, 60)
    model.set_dtype(mx.bfloat16)
    cache = compact_prompt_cache(model, prompt, **SMALL)
    for layer in cache:
        assert [rows.dtype for rows in layer.rows()] == [mx.bfloat16] * 2
    out = model(tokens(6, 3)[None], cache)
    assert out.dtype == mx.bfloat16 and mx.isfinite(out).all()
    assert cache[0].rows()[0].dtype == mx.bfloat16


@pytest.mark.parametrize("prefill", [1, 7, 2048])
def test_logits_do_not_depend_on_the_prefill_steps(prefill):
    model, prompt, more = shared_model(), tokens(6, 90), tokens(7, 8)
    ours, expected = (
        logits(
            model,
            more,
            [1] * 8,
            compact_prompt_cache(model, prompt, prefill_step_size=size, **SMALL),
        )
        for size in (prefill, 64)
    )
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cuts", [[1] * 30, [30], [7, 1, 1, 20, 1]])
def test_decoding_is_attention_without_the_dropped_rows(cuts):
    cache, reference = compacted()
    check_decoding(cache, reference, tokens(1, 30), cuts)
    for layer in cache:
        assert (layer.offset, layer.size(), layer.dropped) == (90, 46, 44)


def test_dropped_rows_are_missed():
    model = shared_model()
    cache, _ = compacted()
    whole = Reference(model, tokens(0, 60)).feed(tokens(1, 1))
    assert np.abs(step(model, tokens(1, 1), cache) - whole).max() > 0.05


def test_long_decoding_outgrows_every_buffer():
    cache, reference = compacted(budget=250, length=270)
    check_decoding(cache, reference, tokens(1, 300), [3, 1, 1, 251, 1, 43])


@pytest.mark.parametrize(
    "facts", [dict(budget=60), dict(budget=1000), dict(budget=8, min_tokens=60)]
)
def test_a_sufficient_budget_changes_nothing(facts):
    model, prompt, more = shared_model(), tokens(0, 60), tokens(1, 20)
    cache = compact_prompt_cache(model, prompt, **{**SMALL, **facts})
    stock = make_prompt_cache(model)
    step(model, prompt, stock)
    for ours, layer in zip(cache, stock):
        assert (ours.offset, ours.size(), ours.dropped) == (60, 60, 0)
        assert (columns_of(ours, layer) == range(60)).all()
    cuts = [1] * 10 + [10]
    expected = logits(model, more, cuts, stock)
    np.testing.assert_allclose(logits(model, more, cuts, cache), expected, **NOISE)


def test_one_token_is_a_prompt():
    cache, reference = compacted(length=1, budget=6)
    assert (cache[0].offset, cache[0].size()) == (1, 1)
    check_decoding(cache, reference, tokens(1, 5), [1, 4])


def test_masks_as_arrays_are_those_of_the_rows_held():
    cache, _ = compacted()
    for count in (1, 5):
        plain, array = (
            cache[0].make_mask(count, **named) for named in ({}, {"return_array": True})
        )
        expected = window_oracle.shown(plain, count, 16 + count)
        if array is not None:
            assert array.dtype == mx.bool_
            got = np.broadcast_to(np.array(array), expected.shape)
            np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(
            np.broadcast_to(expected, (count, 16 + count)),
            np.tri(count, 16 + count, 16, dtype=bool),
        )


def test_the_whole_prompt_is_not_held_in_memory():
    model, prompt = shared_model(), tokens(0, 1500)
    compact_prompt_cache(model, prompt[:64], **SMALL)
    before = mx.get_active_memory()
    cache = compact_prompt_cache(model, prompt, **SMALL)
    mx.eval([layer.state for layer in cache])
    mx.clear_cache()
    assert mx.get_active_memory() - before < 2 * 1500 * ROW / 2
    assert sum(layer.nbytes for layer in cache) < 2 * 1500 * ROW / 2


@pytest.mark.parametrize("fed, n", [(10, 1), (10, 10), (1, 1), (0, 1), (0, 5), (4, 9)])
def test_trimmed_tokens_were_never_fed(fed, n):
    """Of 60 tokens, the newest five stay in any case."""
    cache, reference = compacted(recent_tokens=5)
    if fed:
        check_decoding(cache, reference, tokens(1, fed), [fed])
    assert [layer.trim(n) for layer in cache] == [n, n]
    reference.trim(n)
    for layer in cache:
        assert (layer.offset, layer.size()) == (60 + fed - n, 16 + fed - n)
        assert layer.dropped == 44
    for ours, layer in zip(cache, reference.layers):
        check_rows(ours, layer)
    check_decoding(cache, reference, tokens(2, 8), [1, 1, 6])


def test_trim_prompt_cache_trims_all_layers():
    cache, reference = compacted(recent_tokens=5)
    check_decoding(cache, reference, tokens(1, 3), [3])
    assert trim_prompt_cache(cache, 6) == 6
    reference.trim(6)
    check_decoding(cache, reference, tokens(2, 3), [1, 2])


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6)), max_size=8))
def test_any_feeding_and_trimming(acts):
    cache, reference = compacted(recent_tokens=5, length=40)
    spare = 5
    for seed, (feeds, n) in enumerate(acts):
        if feeds:
            check_decoding(cache, reference, tokens(seed, n), [n])
            spare += n
        elif n <= spare:
            assert [layer.trim(n) for layer in cache] == [n, n]
            reference.trim(n)
            spare -= n
    check_decoding(cache, reference, tokens(77, 2), [1, 1])


@pytest.mark.parametrize("fed, n", [(0, 16), (0, 59), (0, 61), (3, 19), (3, 1000)])
def test_trimming_into_what_was_dropped_is_refused(fed, n):
    cache, reference = compacted()
    if fed:
        check_decoding(cache, reference, tokens(1, fed), [fed])
    for layer in cache:
        with pytest.raises(ValueError):
            layer.trim(n)
        assert (layer.offset, layer.size()) == (60 + fed, 16 + fed)
    check_decoding(cache, reference, tokens(2, 3), [1, 2])


def is_trimmed_right(cache, reference, n):
    """Whether it is trimmed at all: then what is left is what stood further back."""
    for ours, layer in zip(copy.deepcopy(cache), reference.twin().layers):
        try:
            assert ours.trim(n) == n
        except ValueError:
            assert ours.offset == layer.offset
            return False
        layer.trim(n)
        assert ours.offset == layer.offset
        left = layer.seen().sum(axis=-1).tolist()
        assert [ours.size()] * len(left) == left
        if ours.size():
            check_rows(ours, layer)
    return True


@st.composite
def turns(draw):
    """Lengths of prompts, each with the recent tokens kept at its end."""
    turn = st.tuples(st.integers(1, 30), st.one_of(st.none(), st.integers(0, 9)))
    return draw(st.lists(turn, min_size=1, max_size=3))


@settings(max_examples=20, deadline=None)
@given(turns(), st.integers(0, 4), st.sampled_from([1, 7]))
def test_a_trim_is_right_or_refused(turns, fed, kernel):
    """A turn's recent rows may have gaps: an earlier one has dropped some."""
    model, reference, cache = shared_model(), Reference(shared_model()), None
    facts = dict(budget=12, sink_tokens=2, min_tokens=0, kernel_size=kernel)
    for seed, (length, recent) in enumerate(turns):
        prompt = tokens(seed, length)
        cache = compact_prompt_cache(
            model, prompt, recent_tokens=recent, prompt_cache=cache, **facts
        )
        reference.feed(prompt)
        reference.follow(cache)
    if fed:
        check_decoding(cache, reference, tokens(50, fed), [fed])
    certain = fed + min(length, 1 if recent is None else recent, 10)
    for n in range(cache[0].size() + 1):
        assert is_trimmed_right(cache, reference, n) or n > certain


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("kernel", [1, 7])
def test_recent_rows_across_turns_with_a_gap_are_trimmed_by_position(kernel, n):
    """Of the eight newest rows, one is new and another one's neighbours are gone."""
    facts = dict(budget=16, sink_tokens=2, min_tokens=0, kernel_size=kernel)
    cache, reference = compacted(recent_tokens=1, **facts)
    prompt = tokens(1, 1)
    cache = compact_prompt_cache(
        shared_model(), prompt, recent_tokens=8, prompt_cache=cache, **facts
    )
    reference.feed(prompt)
    reference.follow(cache)
    assert is_trimmed_right(cache, reference, n) or n > 1


@pytest.mark.parametrize("n", [1, 20, 59, 60, 65])
@pytest.mark.parametrize("facts", [dict(budget=60), dict(min_tokens=60)], ids=str)
def test_what_is_held_whole_is_trimmed_anywhere(facts, n):
    cache, reference = compacted(**facts)
    check_decoding(cache, reference, tokens(1, 5), [5])
    assert trim_prompt_cache(cache, n) == n
    reference.trim(n)
    assert (cache[0].offset, cache[0].size(), cache[0].dropped) == (65 - n, 65 - n, 0)
    check_decoding(cache, reference, tokens(2, 5), [1, 4])


@pytest.mark.parametrize("length", [9, 40])
def test_trimmed_tokens_leave_no_trace_in_the_next_turn(length):
    model, held = shared_model(), []
    for fed in (0, 3):
        cache, _ = compacted(length, budget=12)
        if fed:
            step(model, tokens(1, fed), cache)
            assert trim_prompt_cache(cache, fed) == fed
        cache = compact_prompt_cache(
            model, tokens(2, 7), budget=12, min_tokens=0, prompt_cache=cache
        )
        held.append([numpy_rows(layer) for layer in cache])
    np.testing.assert_allclose(held[1], held[0], rtol=1e-4, atol=1e-5)


def test_trimming_nothing_is_nothing():
    cache, reference = compacted()
    assert [layer.trim(0) for layer in cache] == [0, 0]
    check_decoding(cache, reference, tokens(1, 3), [3])


def saved_and_loaded(cache, folder):
    save_prompt_cache(str(folder / "cache.safetensors"), cache)
    return load_prompt_cache(str(folder / "cache.safetensors"))


@pytest.mark.parametrize("fed", [0, 5])
@pytest.mark.parametrize("how", ["saved", "copied"])
def test_a_twin_decodes_and_trims_as_the_cache_itself(how, fed, tmp_path):
    model = shared_model()
    cache, reference = compacted(recent_tokens=3)
    if fed:
        check_decoding(cache, reference, tokens(1, fed), [fed])
    if how == "saved":
        twin = saved_and_loaded(cache, tmp_path)
    else:
        twin = copy.deepcopy(cache)
        assert isinstance(twin, CompactPromptCache)
        assert twin.skipped_layers == {}
    for ours, other in zip(twin, cache):
        assert type(ours) is CompactCache
        assert ours.offset == other.offset == 60 + fed
        assert (ours.size(), ours.dropped) == (other.size(), other.dropped)
    ours = logits(model, tokens(2, 9), [1] * 5 + [4], twin)
    assert cache[0].offset == 60 + fed
    expected = logits(model, tokens(2, 9), [1] * 5 + [4], cache)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)
    # Down to the three newest rows of the prompt, and no further.
    assert trim_prompt_cache(twin, 9 + fed + 3) == 9 + fed + 3
    with pytest.raises(ValueError):
        twin[0].trim(1)
    reference.trim(fed + 3)
    check_decoding(twin, reference, tokens(3, 4), [1, 3])
    assert cache[0].offset == 60 + fed + 9


def test_a_loaded_cache_is_compacted_again(tmp_path):
    model = shared_model()
    cache, reference = compacted(budget=24)
    loaded = saved_and_loaded(cache, tmp_path)
    prompt = tokens(1, 40)
    again = compact_prompt_cache(
        model, prompt, budget=24, min_tokens=0, prompt_cache=loaded
    )
    reference.feed(prompt)
    reference.compact(24, min_tokens=0).check(again)


@pytest.mark.parametrize("end", [None, 12, 11])
def test_states_are_those_that_earlier_versions_saved(end):
    """Of 12 tokens 7 are dropped, and behind 2 rows nothing is missing."""
    known = end is not None
    mx.random.seed(0)
    rows = [mx.random.normal((1, HEADS, 5, WIDTH)) for _ in range(2)]
    queries = mx.random.normal((1, HEADS * GROUP, 3, WIDTH))
    sinks = mx.random.normal((HEADS * GROUP,))
    numbers = mx.array([7, 2, end or 0, 0.25, known, known], mx.float32)
    state = [numbers, *[queries, sinks] * known, *rows]
    cache = CompactCache.from_state(state)
    assert (cache.offset, cache.size(), cache.dropped) == (12, 5, 7)
    assert cache.observed == (end == 12)
    again = cache.state
    assert [each.dtype for each in again] == [each.dtype for each in state]
    assert all(mx.array_equal(*pair) for pair in zip(again, state, strict=True))
    with pytest.raises(ValueError, match="can't trim"):
        copy.deepcopy(cache).trim(4)
    method = SnapKV(3, recent_tokens=1, min_tokens=0)
    if cache.observed:
        scores = window_scores(queries, rows[0], 0.25, sinks=sinks)
        columns = method.columns(scores)[..., None]
        cache.compact(method)
        expected = [mx.take_along_axis(each, columns, axis=2) for each in rows]
        assert all(mx.array_equal(*pair) for pair in zip(cache.rows(), expected))
    else:
        with pytest.raises(ValueError, match="weren't observed"):
            cache.compact(method)


@pytest.mark.parametrize("budget, numbers", [(16, [44, 14, 0]), (60, [0, 0, 60])])
def test_states_of_prompts(budget, numbers):
    """Compacted, and whole: there the last queries observe the next turn too."""
    for layer in compacted(budget=budget, recent_tokens=2)[0]:
        state, whole = layer.state, budget == 60
        assert state[0].tolist() == [*numbers, 0.25, whole, False]
        window = [(1, HEADS * GROUP, 32, WIDTH)] * whole
        rows = [(1, HEADS, budget, WIDTH)] * 2
        assert [array.shape for array in state[1:]] == [*window, *rows]


@pytest.mark.parametrize("prefill", [7, 2048])
def test_each_turn_is_compacted_to_the_budget(prefill):
    model, reference = shared_model(), Reference(shared_model())
    cache, seen = None, 0
    for turn, length in enumerate((80, 45, 33, 120)):
        prompt = tokens(turn, length)
        cache = compact_prompt_cache(
            model,
            prompt,
            budget=24,
            min_tokens=0,
            prompt_cache=cache,
            prefill_step_size=prefill,
        )
        assert isinstance(cache, CompactPromptCache) and cache.skipped_layers == {}
        reference.feed(prompt)
        reference.compact(24, min_tokens=0).check(cache)
        check_decoding(cache, reference, tokens(20 + turn, 6), [1, 1, 4])
        seen += length + 6
        for ours, layer in zip(cache, reference.layers):
            assert (ours.offset, ours.size()) == (seen, 30)
            assert (layer.held()[0][:, :4] == range(4)).all()


def test_turns_below_min_tokens_are_held_whole():
    model, reference = shared_model(), Reference(shared_model())
    cache, facts = None, dict(budget=16, min_tokens=50)
    for turn, (length, held) in enumerate([(20, 20), (30, 50), (40, 16)]):
        prompt = tokens(turn, length)
        cache = compact_prompt_cache(model, prompt, prompt_cache=cache, **facts)
        reference.feed(prompt)
        reference.compact(**facts).check(cache)
        assert cache[0].size() == held


def test_a_short_turn_is_scored_by_its_own_queries():
    model = shared_model()
    cache, reference = compacted(budget=24)
    prompt = tokens(1, 5)
    cache = compact_prompt_cache(
        model, prompt, budget=24, min_tokens=0, prompt_cache=cache
    )
    assert (cache[0].offset, cache[0].size()) == (65, 24)
    reference.feed(prompt)
    reference.compact(24, min_tokens=0).check(cache)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(6, 30))
def test_sinks_survive_every_turn(lengths, budget):
    model, reference, cache = shared_model(), Reference(shared_model()), None
    for turn, length in enumerate(lengths):
        prompt = tokens(turn, length)
        cache = compact_prompt_cache(
            model, prompt, budget=budget, min_tokens=0, prompt_cache=cache
        )
        reference.feed(prompt)
        reference.follow(cache)
        total = sum(lengths[: turn + 1])
        for ours, layer in zip(cache, reference.layers):
            assert (ours.offset, ours.size()) == (total, min(total, budget))
            first = min(4, total)
            assert (layer.held()[0][:, :first] == range(first)).all()
    check_decoding(cache, reference, tokens(50, 2), [1, 1])


def test_sliding_layers_are_skipped():
    model, prompt = hybrid_model(), tokens(0, 60)
    cache = compact_prompt_cache(model, prompt, **SMALL)
    assert list(cache.skipped_layers) == [0, 2]
    assert all(isinstance(why, str) and why for why in cache.skipped_layers.values())
    kinds = [RotatingKVCache, CompactCache, RotatingKVCache]
    assert [type(layer) for layer in cache] == kinds
    assert (cache[1].offset, cache[1].size()) == (60, 16)
    layers = [Whole() if kind is CompactCache else kind(8) for kind in kinds]
    reference = Reference(model, prompt, layers)
    whole = layers[1]
    reference.layers = [whole]
    reference.compact(**SMALL).check([cache[1]])
    reference.layers = layers
    check_decoding(cache, reference, tokens(1, 12), [1] * 12)
    again = compact_prompt_cache(model, tokens(2, 40), prompt_cache=cache, **SMALL)
    assert list(again.skipped_layers) == [0, 2]
    assert (again[1].offset, again[1].size()) == (112, 16)


RAGGED = [(60, 16), (9, 30), (100, 24), (41, 8)]


def ragged():
    """Caches of different lengths and budgets, and their references."""
    pairs = [
        compacted(length, seed, budget=budget, recent_tokens=3)
        for seed, (length, budget) in enumerate(RAGGED)
    ]
    return [cache for cache, _ in pairs], [reference for _, reference in pairs]


def batch_step(model, inputs, batch):
    out = np.array(model(mx.stack(inputs), batch))
    mx.eval([layer.state for layer in batch])
    return out


def check_batch(batch, references, cuts, seed=30):
    for cut in cuts:
        seed += 1
        inputs = [tokens(seed * 10 + i, cut) for i in range(len(references))]
        ours = batch_step(references[0].model, inputs, batch)
        for got, own, reference in zip(ours, inputs, references):
            np.testing.assert_allclose(got, reference.feed(own), **NOISE)


def check_extracted(batch, references):
    for i, reference in enumerate(references):
        alone = [layer.extract(i) for layer in batch]
        check_alone(alone, reference.twin(), tokens(80 + i, 3), [1, 2])


def check_alone(alone, reference, inputs, cuts):
    assert all(type(layer) is CompactCache for layer in alone)
    for ours, layer in zip(alone, reference.layers):
        check_rows(ours, layer)
    if cuts:
        check_decoding(alone, reference, inputs, cuts)


def test_a_ragged_batch_decodes_as_each_alone():
    caches, references = ragged()
    batch = merged(caches)
    assert all(type(layer) is BatchCompactCache for layer in batch)
    check_batch(batch, references, [1, 1, 5, 1])
    check_extracted(batch, references)


def test_merging_leaves_the_caches_as_they_were():
    caches, references = ragged()
    check_batch(merged(caches), [one.twin() for one in references], [1, 3])
    for cache, reference in zip(caches, references):
        check_decoding(cache, reference, tokens(5, 3), [3])


def test_what_is_merged_is_extracted():
    caches, references = ragged()
    check_extracted(merged(caches), references)


@pytest.mark.parametrize("indices", [[0], [1], [3, 1], [0, 2, 3], [2, 0]], ids=str)
def test_a_filtered_batch_goes_on_with_those_that_stay(indices):
    caches, references = ragged()
    batch = merged(caches)
    check_batch(batch, references, [1, 2])
    for layer in batch:
        layer.filter(indices)
    kept = [references[i] for i in indices]
    check_batch(batch, kept, [1, 4, 1])
    check_extracted(batch, kept)


@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("fed", [[], [1, 3]])
def test_an_extended_batch_goes_on_with_all(cut, fed):
    caches, references = ragged()
    batch, other = merged(caches[:cut]), merged(caches[cut:])
    check_batch(batch, references[:cut], fed)
    for layer, more in zip(batch, other):
        layer.extend(more)
    check_batch(batch, references, [1, 4, 1])
    check_extracted(batch, references)


def feed_ragged(batch, references, lengths, chunk, seed=60):
    """Prompts of several lengths, as mlx-lm's batches take them."""
    longest = max(lengths)
    prompts = [tokens(seed + i, n) for i, n in enumerate(lengths)]
    padding = [longest - n for n in lengths]
    padded = [mx.pad(prompt, (0, n)) for prompt, n in zip(prompts, padding)]
    if max(padding) > 0:
        for layer in batch:
            layer.prepare(lengths=lengths, right_padding=padding)
    parts = []
    for start in range(0, longest, chunk):
        inputs = [row[start : start + chunk] for row in padded]
        parts.append(batch_step(references[0].model, inputs, batch))
    if max(padding) > 0:
        for layer in batch:
            layer.finalize()
    ours = np.concatenate(parts, axis=1)
    for got, own, reference in zip(ours, prompts, references):
        np.testing.assert_allclose(got[: len(own)], reference.feed(own), **NOISE)


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_ragged_prompts_are_padded_on_the_right(chunk):
    caches, references = ragged()
    batch = merged(caches)
    check_batch(batch, references, [1])
    feed_ragged(batch, references, [7, 1, 4, 12], chunk)
    check_batch(batch, references, [1, 2, 1])
    check_extracted(batch, references)


def test_an_extracted_cache_trims_as_the_merged_one_would():
    caches, references = ragged()
    batch = merged(caches)
    check_batch(batch, references, [2])
    alone, reference = [layer.extract(2) for layer in batch], references[2]
    for layer in alone:
        assert layer.trim(5) == 5
        with pytest.raises(ValueError):
            copy.deepcopy(layer).trim(24)
    reference.trim(5)
    check_decoding(alone, reference, tokens(1, 4), [4])


def test_a_batch_trims_what_all_of_it_holds():
    caches, references = ragged()
    batch = merged(caches)
    check_batch(batch, references, [3])
    for layer in batch:
        assert layer.is_trimmable() and layer.trim(5) == 5
    for reference in references:
        reference.trim(5)
    check_batch(batch, references, [1, 2])
    check_extracted(batch, references)


class CompactHistory(BatchHistory):
    """A row is a reference."""

    most, shortest, longest, decodes = 4, 1, 6, 3

    def set_up(self, draw):
        self.seed = 100

    def alone(self, draw):
        length, budget = draw(st.sampled_from(RAGGED), "prompt and budget")
        return compacted(length, length, budget=budget, recent_tokens=3)

    def feed(self, batch, rows, lengths, chunk):
        self.seed += len(rows)
        feed_ragged(batch, rows, lengths, chunk, self.seed)

    def check_alone(self, caches, row, cuts):
        self.seed += 1
        check_alone(caches, row, tokens(self.seed, sum(cuts)), cuts)

    def twin(self, row):
        return row.twin()


def test_any_life_of_a_batch():
    hold(CompactHistory, examples=12, steps=5)


@pytest.mark.parametrize("together", [1, 2, 8])
@pytest.mark.parametrize("prefill", [5, 64])
def test_batch_generator_gives_what_each_gives_alone_in_two_turns(prefill, together):
    model = shared_model()
    caches, _ = ragged()
    alone = copy.deepcopy(caches)
    prompts = [
        [tokens(4 * turn + i, n).tolist() for i, n in enumerate(lengths)]
        for turn, lengths in enumerate(((1, 13, 6, 2), (7, 1, 20, 3)))
    ]
    sizes = dict(prefill_batch_size=together, completion_batch_size=together)
    sizes["prefill_step_size"] = prefill
    for left in batched_turns(model, prompts, caches, alone, 8, **sizes):
        offsets = [[cache[0].offset for cache in each] for each in (left, alone)]
        assert offsets[0] == offsets[1]


def test_generate_step_decodes_from_a_compacted_prompt():
    model = shared_model()
    cache, reference = compacted()
    inputs = [5]
    for _ in range(10):
        last = reference.feed(mx.array(inputs[-1:]))[-1]
        inputs.append(int(last.argmax()))
    assert alone_tokens(model, [5], cache, 10) == inputs[1:]


def test_stream_generate_decodes_from_a_compacted_prompt():
    model, tokenizer = make_model(vocab_size=260), small_models.tokenizer()
    text = "Attention sinks stay alive, and so do the newest tokens of a prompt."
    prompt = mx.array(tokenizer.encode(text))
    cache = compact_prompt_cache(model, prompt[:-1], **SMALL)
    alone = alone_tokens(model, prompt[-1:].tolist(), copy.deepcopy(cache), 8)
    responses = stream_generate(
        model, tokenizer, prompt[-1:].tolist(), max_tokens=8, prompt_cache=cache
    )
    ours = [response.token for response in responses]
    # It may stop at an end-of-text token, which generate_step doesn't know.
    assert ours == alone[: len(ours)] and len(ours) > 1


@pytest.mark.parametrize(
    "wrong",
    [
        dict(prompt=mx.array([], mx.int32)),
        dict(prompt=mx.zeros((1, 60), mx.int32)),
        dict(prompt=mx.zeros((2, 60), mx.int32)),
        dict(prefill_step_size=0),
        dict(budget=0),
        dict(budget=-1),
    ],
    ids=["empty", "one row", "two rows", "no steps", "no budget", "negative budget"],
)
def test_wrong_arguments_are_refused(wrong):
    facts = {"prompt": tokens(0, 60), **SMALL, **wrong}
    with pytest.raises(ValueError):
        compact_prompt_cache(shared_model(), **facts)


def test_text_for_tokens_is_refused_with_what_to_do():
    for budget in (16, SnapKV(16)):
        with pytest.raises(TypeError, match=r"tokenizer\.encode\(prompt\)"):
            mlx_sinks.compact_prompt_cache(shared_model(), "Why?", budget)
    for prompt_cache in ([], ()):
        with pytest.raises(ValueError, match="a list with a cache for each layer"):
            compact_prompt_cache(shared_model(), [1], prompt_cache, **SMALL)


def test_a_number_is_a_method_with_that_budget():
    prompt = tokens(0, 300)
    one, other = (
        mlx_sinks.compact_prompt_cache(shared_model(), prompt, budget)
        for budget in (32, SnapKV(32))
    )
    for ours, theirs in zip(one, other):
        assert all(map(mx.array_equal, ours.state, theirs.state))


def test_an_empty_next_turn_is_refused():
    cache, reference = compacted()
    with pytest.raises(ValueError):
        compact_prompt_cache(
            shared_model(), mx.array([], mx.int32), prompt_cache=cache, **SMALL
        )
    check_decoding(cache, reference, tokens(1, 2), [2])


def test_quantising_is_refused():
    cache, _ = compacted()
    with pytest.raises(ValueError):
        cache[0].to_quantized(group_size=64, bits=8)
    with pytest.raises(ValueError):
        steps = generate_step(
            mx.array([1, 2, 3]),
            shared_model(),
            max_tokens=2,
            prompt_cache=cache,
            kv_bits=8,
            quantized_kv_start=0,
        )
        list(steps)


@pytest.mark.parametrize("prefill", [1, 7, 64, 2048])
@pytest.mark.parametrize("length", [1, 60, 64])
def test_progress_goes_from_nothing_to_all(prefill, length):
    told = []
    compact_prompt_cache(
        shared_model(),
        tokens(0, length),
        prefill_step_size=prefill,
        prompt_progress_callback=lambda *progress: told.append(progress),
        **SMALL,
    )
    assert told[0] == (0, length) and told[-1] == (length, length)
    done = [at for at, _ in told]
    assert done == sorted(done) and {total for _, total in told} == {length}
    if prefill < length:
        assert len(set(done)) > 2


def test_progress_counts_the_new_tokens_alone():
    cache, _ = compacted()
    told = []
    compact_prompt_cache(
        shared_model(),
        tokens(1, 20),
        prompt_cache=cache,
        prompt_progress_callback=lambda *progress: told.append(progress),
        **SMALL,
    )
    assert told[0] == (0, 20) and told[-1] == (20, 20)


def upstream_objects(model):
    """Everything that may be patched, by the place where it is found."""
    found = {}
    places = {
        name: module
        for name, module in list(sys.modules.items())
        if name.split(".")[0] == "mlx_lm" and module is not None
    }
    places["mx.fast"] = mx.fast
    for name, place in places.items():
        for key, thing in list(vars(place).items()):
            found[name, key] = thing
            if isinstance(thing, type) and thing.__module__.startswith("mlx_lm"):
                found.update(
                    ((name, key, inner), value) for inner, value in vars(thing).items()
                )
    for path, module in model.named_modules():
        found["model", path] = module
        found["class", path] = type(module)
        found["call", path] = type(module).__call__
        found.update((("own", path, key), x) for key, x in vars(module).items())
        found.update((("child", path, key), x) for key, x in module.items())
    return found


@contextlib.contextmanager
def untouched(model):
    before = upstream_objects(model)
    yield
    after = upstream_objects(model)
    assert [at for at, thing in before.items() if after.get(at) is not thing] == []
    # mlx-lm loads caches of classes that this module knows; the slot names are what
    # Python notes down where an object is copied.
    added = {at for at in after if at not in before and at[0] != KVCache.__module__}
    assert {at for at in added if at[-1] != "__slotnames__"} == set()


class Interrupted(BaseException):
    pass


class Broken(llama.nn.Module):
    def __call__(self, x):
        raise ZeroDivisionError


def test_stock_models_are_untouched():
    model = make_model()
    compact_prompt_cache(model, tokens(0, 20), **SMALL)
    with untouched(model):
        cache = compact_prompt_cache(model, tokens(0, 60), **SMALL)
        step(model, tokens(1, 2), cache)


def test_stock_models_are_untouched_at_the_first_time():
    tests = Path(small_models.__file__).parent
    outcome = processes.python(FIRST_TIME, PYTHONPATH=str(tests))
    assert outcome.status == 0, outcome.stderr


FIRST_TIME = """
import mlx.core as mx
from mlx_lm.models import base, llama
import small_models

model = small_models.make_llama(0)

def seen():
    kinds = {type(module) for _, module in model.named_modules()}
    calls = {kind: kind.__call__ for kind in kinds}
    return calls, {**vars(llama)}, {**vars(base)}, {**vars(mx.fast)}

before = seen()
import mlx_sinks
mlx_sinks.compact_prompt_cache(model, mx.arange(60), mlx_sinks.SnapKV(16, min_tokens=0))
for old, new in zip(before, seen()):
    assert [key for key in old if new[key] is not old[key]] == []
    assert set(new) == set(old), set(new) ^ set(old)
"""


@pytest.mark.parametrize("error", [ZeroDivisionError, Interrupted])
@pytest.mark.parametrize("at", [0, 20, 60])
def test_stock_models_are_untouched_by_an_interruption(error, at):
    model = make_model()

    def interrupt(done, _):
        if done >= at:
            raise error

    with untouched(model), pytest.raises(error):
        compact_prompt_cache(
            model,
            tokens(0, 60),
            prefill_step_size=10,
            prompt_progress_callback=interrupt,
            **SMALL,
        )
    expected = Reference(model, tokens(0, 60)).compact(**SMALL)
    expected.check(compact_prompt_cache(model, tokens(0, 60), **SMALL))


def test_stock_models_are_untouched_by_an_error_in_a_layer():
    model = make_model()
    mlp, model.layers[1].mlp = model.layers[1].mlp, Broken()
    with untouched(model), pytest.raises(ZeroDivisionError):
        compact_prompt_cache(model, tokens(0, 60), **SMALL)
    model.layers[1].mlp = mlp
    expected = Reference(model, tokens(0, 60)).compact(**SMALL)
    expected.check(compact_prompt_cache(model, tokens(0, 60), **SMALL))


def test_stock_generation_is_as_before():
    model, prompt = make_model(), tokens(0, 60)
    before = step(model, prompt, make_prompt_cache(model))
    compact_prompt_cache(model, prompt, **SMALL)
    cache = make_prompt_cache(model)
    assert [type(layer) for layer in cache] == [KVCache] * 2
    np.testing.assert_array_equal(step(model, prompt, cache), before)


TWO_THREADS = """
import json, os, threading
import mlx.core as mx
from mlx_sinks import SnapKV, compact_prompt_cache
import small_models

shape = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, vocab_size=97)
models = [small_models.make_llama(seed, **shape) for seed in (0, 1)]
turns, seen = [threading.Semaphore(), threading.Semaphore(0)], [{}, {}]

def compacted(number, alone):
    def wait(*_):
        if not alone:
            turns[1 - number].release()
            turns[number].acquire(timeout=20)
    prompt = (mx.arange(60) * (7 + 4 * number)) % 97
    cache = compact_prompt_cache(
        models[number], prompt, SnapKV(16 + 4 * number, min_tokens=0),
        prefill_step_size=10, prompt_progress_callback=wait)
    rows = [rows.tolist() for layer in cache for rows in layer.rows()]
    logits = models[number](mx.array([[1, 2, 3]]), cache)
    seen[number][alone] = [rows, logits.tolist()]

for number in (0, 1):
    compacted(number, True)

done = threading.Event()

def other():
    compacted(1, False)
    turns[0].release(100)
    done.set()
    threading.Event().wait()

threading.Thread(target=other, daemon=True).start()
compacted(0, False)
turns[1].release(100)
assert done.wait(60)
print(json.dumps([[both[True], both[False]] for both in seen]), flush=True)
os._exit(0)
"""


def test_two_models_in_two_threads_give_what_each_gives_alone():
    """By turns, in a process that ends before a thread does: mlx aborts otherwise."""
    tests = Path(small_models.__file__).parent
    outcome = processes.python(TWO_THREADS, PYTHONPATH=str(tests))
    assert outcome.status == 0, outcome.stderr
    for alone, together in json.loads(outcome.stdout):
        for ours, expected in zip(together[0] + together[1:], alone[0] + alone[1:]):
            np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)
