"""Speculative decoding with a window: the tokens of plain decoding, and its caches."""

import copy
import importlib

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, RotatingKVCache, trim_prompt_cache

import mlx_sinks
import small_models
from mlx_sinks import SinkCache
from mlx_sinks.windows.speculation import speculating
from speculations import Case, differs, generate, model
from window_streams import check, feed, stream


@pytest.fixture
def rotating():
    with mlx_sinks.patched(targets=["rotating"]):
        yield


# What is in the issue, past the window, with a draft that is mostly wrong.
CASE = Case(20, 4, prompt=16, drafts=3, new=30, step=512, rotating=False, draft=1)


@pytest.mark.parametrize("kept_by_upstream", [False, True])
@pytest.mark.parametrize("draft", [0, 1], ids=["itself", "another"])
def test_the_tokens_are_those_of_plain_decoding(rotating, kept_by_upstream, draft):
    case = Case(20, 4, 16, 3, 30, 512, kept_by_upstream, draft)
    plain, (tokens, accepted, _) = case.plainly(), case.with_drafts()
    assert tokens == plain
    assert (accepted >= 20) == (draft == 0)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_whatever_the_window_and_the_drafts(data):
    with mlx_sinks.patched(targets=["rotating"]):
        case = Case.drawn(lambda low, high: data.draw(st.integers(low, high)))
        wrong, _ = differs(case)
    assert not wrong


@pytest.mark.parametrize("kept_by_upstream", [False, True])
def test_the_caches_go_on_as_if_nothing_had_been_trimmed(rotating, kept_by_upstream):
    """The last token was never read; the caches are the list's own, without a rest."""
    case = Case(20, 4, 16, 3, 30, 512, kept_by_upstream, 1)
    tokens, _, caches = case.with_drafts()
    kind = RotatingKVCache if kept_by_upstream else SinkCache
    assert {type(cache) for cache in caches} == {kind}
    read = case.tokens() + tokens
    read = read[: caches[0].offset]
    fresh = case.caches(model(0))
    small_models.logits(model(0), read, [len(read)], fresh)
    after = [
        small_models.logits(model(0), small_models.tokens(7, 9), [1] * 9, each)
        for each in (caches[:2], fresh)
    ]
    np.testing.assert_allclose(*after, atol=1e-4)
    assert caches[0].nbytes == fresh[0].nbytes


def test_a_models_own_sliding_windows_too(rotating):
    """Upstream's lose what rejected drafts evicted."""
    caches = [RotatingKVCache(max_size=12) for _ in range(4)]
    plain, speculated = (
        [int(step[0]) for step in steps]
        for steps in (
            generate.generate_step(
                mx.array(CASE.tokens()),
                model(0),
                max_tokens=30,
                prompt_cache=copy.deepcopy(caches[:2]),
            ),
            generate.speculative_generate_step(
                mx.array(CASE.tokens()),
                model(0),
                model(1),
                max_tokens=30,
                prompt_cache=caches,
            ),
        )
    )
    assert speculated == plain


STEPS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=12)


@given(st.data(), st.integers(1, 24), st.integers(1, 8), STEPS)
@settings(max_examples=60, deadline=None)
def test_what_is_seen_after_trims(data, window, reserve, steps):
    """Each step against float64; each trim is one that the reserve allows."""
    sinks = data.draw(st.integers(0, window - 1))
    first = data.draw(st.integers(0, 40))
    cache, whole = SinkCache(window, sinks), stream(1, 200)
    seen = check(cache, whole, [first] if first else [], window, sinks)
    caches = [cache, KVCache()]
    with speculating(caches, reserve):
        for new, trimmed in steps:
            seen = check(cache, whole, [new], window, sinks, start=seen)
            trimmed = min(trimmed, new, reserve)
            assert cache.is_trimmable()
            cache.trim(trimmed)
            seen -= trimmed
            assert cache.offset == seen
        copied = SinkCache.from_state(cache.state)
        check(copied, whole, [1, 5, 1], window, sinks, start=seen)
    assert cache._storage == cache.window
    check(cache, whole, [1, 1, 5, 1], window, sinks, start=seen)


def test_a_trim_beyond_the_reserve_is_refused():
    cache, whole = SinkCache(8, 2), stream(1, 40)
    with speculating([cache], 3):
        check(cache, whole, [20], 8, 2)
        assert cache.trim(3) == 3
        with pytest.raises(ValueError, match="can't trim 1 tokens"):
            cache.trim(1)
        check(cache, whole, [1], 8, 2, start=17)


def test_without_the_target_it_is_refused_and_no_trim_is_passed_over():
    with pytest.raises(ValueError, match="requires a trimmable .*SinkCache"):
        CASE.with_drafts()


def test_what_can_be_trimmed_is_told_truly():
    cache, whole = SinkCache(8, 2), stream(1, 40)
    feed(cache, whole, 0, 5)
    assert cache.is_trimmable() and trim_prompt_cache([cache], 1) == 1
    feed(cache, whole, 4, 12)
    assert not cache.is_trimmable() and trim_prompt_cache([cache], 1) == 0


@pytest.mark.parametrize("kept_by_upstream", [False, True])
def test_ctrl_c_stays_ctrl_c(rotating, kept_by_upstream):
    """Upstream trims as it ends, also before it has read what it trims."""
    case = Case(12, 3, 30, 3, 20, 512, kept_by_upstream, 1)
    caches = case.caches(model(0)) + case.caches(model(1))
    for one, made in ((model(0), caches[:2]), (model(1), caches[2:])):
        small_models.logits(one, case.tokens(), [30], made)

    class Interrupted:
        layers = model(0).layers

        def __call__(self, *_, **__):
            raise KeyboardInterrupt

    steps = generate.speculative_generate_step(
        mx.array([1]), Interrupted(), model(1), prompt_cache=caches
    )
    with pytest.raises(KeyboardInterrupt):
        next(steps)


def test_a_cache_that_had_evicted_before_it_was_asked_says_so():
    cache = SinkCache(8, 2)
    feed(cache, stream(1, 40)[:, :, :9], 0, 9)
    assert not cache.is_trimmable()
    assert trim_prompt_cache([cache], 1) == 0


def test_local_positions_are_refused_before_anything_is_changed(rotating):
    local = mlx_sinks.make_sink_cache(model(0), 16, position_mode="local")
    own = [RotatingKVCache(max_size=16, keep=2), local[0]]
    before = [*own]
    steps = generate.speculative_generate_step(
        mx.array([1, 2, 3]), model(0), model(0), prompt_cache=own
    )
    with pytest.raises(ValueError, match="position_mode='local' can't be used with a"):
        next(steps)
    assert own == before


def test_a_cache_with_a_reserve_joins_no_batch():
    cache, other = SinkCache(8), SinkCache(8)
    with speculating([cache], 2), pytest.raises(ValueError, match="can't be part of a"):
        SinkCache.merge([other, cache])


def test_an_interrupted_generation_leaves_windows_alone(rotating):
    caches = CASE.caches(model(0)) + CASE.caches(model(1))
    steps = generate.speculative_generate_step(
        mx.array(CASE.tokens()), model(0), model(1), prompt_cache=caches
    )
    for _ in range(7):
        next(steps)
    steps.close()
    assert all(cache._storage == cache.window for cache in caches)


SLIDING = {
    "gemma3_text": dict(
        sliding_window_pattern=2,
        rope_local_base_freq=10000.0,
        query_pre_attn_scalar=32.0,
        intermediate_size=64,
    ),
    "gpt_oss": dict(
        num_local_experts=4,
        num_experts_per_tok=2,
        intermediate_size=64,
        rope_scaling=None,
    ),
}


def sliding_model(kind, seed):
    """Every second layer has a window of 16 tokens of its own."""
    upstream = importlib.import_module(f"mlx_lm.models.{kind}")
    mx.random.seed(seed)
    args = upstream.ModelArgs(
        model_type=kind,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=260,
        sliding_window=16,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        **SLIDING[kind],
    )
    model = upstream.Model(args)
    small_models.spread(model)
    return model


@pytest.mark.parametrize("kind", SLIDING)
def test_models_with_sliding_layers(rotating, kind):
    """Stock writes other text in more than half of such runs."""
    model, draft = sliding_model(kind, 0), sliding_model(kind, 1)
    for seed, length in enumerate((3, 16, 29, 50)):
        prompt = mx.array(small_models.tokens(seed, length))
        plain = generate.generate_step(prompt, model, max_tokens=30)
        ours = generate.speculative_generate_step(
            prompt, model, draft, max_tokens=30, num_draft_tokens=1 + seed
        )
        assert [int(t) for t, *_ in ours] == [int(t) for t, *_ in plain]
