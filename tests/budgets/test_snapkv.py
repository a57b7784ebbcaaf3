"""SnapKV's choice of rows against NumPy: sinks, the newest, then the best scores."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_sinks import snapkv_keep_columns, snapkv_keep_indices

LARGEST = float(np.finfo(np.float32).max)
SPECIAL = (np.nan, np.inf, -np.inf, LARGEST, -LARGEST, 3e38, 0.0, -0.0)
# Few different values, so that ties are the rule.
ANY_SCORE = st.one_of(st.integers(-2, 2).map(float), st.sampled_from(SPECIAL))
# Beyond float32 too, where the order among them is not at stake.
LOUD_SCORE = st.one_of(ANY_SCORE, st.sampled_from([1e300, -1e300]))
COUNT = st.integers(0, 12)
RECENT = st.one_of(st.none(), COUNT)


def expected(
    seq_len,
    budget,
    scores,
    sink_tokens=4,
    recent_tokens=None,
    min_tokens=128,
    guarantee_sinks=True,
):
    """The contract, a row at a time."""
    if seq_len <= min_tokens or seq_len <= budget:
        return tuple(range(seq_len))
    eighth = max(1, budget // 8)
    sinks = sink_tokens if guarantee_sinks else min(sink_tokens, eighth)
    sinks = min(sinks, budget)
    recent = eighth if recent_tokens is None else recent_tokens
    recent = min(recent, budget - sinks, seq_len - sinks)
    middle = range(sinks, seq_len - recent)

    def rank(row):
        score = float(scores[row])
        return (-np.inf if np.isnan(score) else score, row)

    best = sorted(middle, key=rank, reverse=True)[: budget - sinks - recent]
    return (*range(sinks), *sorted(best), *range(seq_len - recent, seq_len))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(ANY_SCORE, max_size=60),
    st.integers(1, 70),
    COUNT,
    RECENT,
    st.sampled_from([0, 10, 128]),
    st.booleans(),
)
def test_rows_are_those_of_the_contract(
    scores, budget, sink_tokens, recent_tokens, min_tokens, guarantee_sinks
):
    facts = dict(
        sink_tokens=sink_tokens,
        recent_tokens=recent_tokens,
        min_tokens=min_tokens,
        guarantee_sinks=guarantee_sinks,
    )
    kept = snapkv_keep_indices(len(scores), budget, scores, **facts)
    assert type(kept) is tuple and all(type(row) is int for row in kept)
    assert kept == expected(len(scores), budget, scores, **facts)


@settings(max_examples=60, deadline=None)
@given(st.lists(LOUD_SCORE, min_size=2, max_size=60), COUNT, RECENT, st.data())
def test_no_score_displaces_a_sink_or_the_newest(scores, sinks, recent, data):
    length = len(scores)
    budget = data.draw(st.integers(1, length - 1), "budget")
    kept = snapkv_keep_indices(
        length, budget, scores, sink_tokens=sinks, recent_tokens=recent, min_tokens=0
    )
    assert len(kept) == budget and list(kept) == sorted(set(kept))
    floor = min(sinks, budget)
    recent = max(1, budget // 8) if recent is None else recent
    newest = min(recent, budget - floor)
    assert set(range(floor)) <= set(kept)
    assert set(range(length - newest, length)) <= set(kept)


def test_loud_middle_rows_leave_sinks_and_the_newest():
    scores = [0.0] * 4 + [1e9] * 294 + [0.0] * 2
    kept = snapkv_keep_indices(300, 16, scores)
    assert len(kept) == 16
    assert kept[:4] == (0, 1, 2, 3) and kept[-2:] == (298, 299)
    unguarded = snapkv_keep_indices(300, 16, scores, guarantee_sinks=False)
    assert len(unguarded) == 16
    assert [row for row in unguarded if row < 4] == [0, 1]
    assert 299 in unguarded


@pytest.mark.parametrize("loud", [1e9, float("inf")])
def test_unguarded_sinks_may_still_win_by_their_scores(loud):
    scores = [loud] * 4 + [0.0] * 296
    kept = snapkv_keep_indices(300, 16, scores, guarantee_sinks=False)
    assert kept[:4] == (0, 1, 2, 3)


@pytest.mark.parametrize("budget, capped", [(1, 1), (8, 1), (15, 1), (16, 2), (40, 5)])
def test_unguarded_sinks_are_an_eighth_of_the_budget(budget, capped):
    scores = [-1.0] * 10 + [1.0] * 290
    kept = snapkv_keep_indices(
        300, budget, scores, sink_tokens=10, guarantee_sinks=False
    )
    assert [row for row in kept if row < 10] == list(range(capped))


@pytest.mark.parametrize("length", [0, 1, 16, 128])
def test_short_prompts_are_kept_whole(length):
    whole = tuple(range(length))
    assert snapkv_keep_indices(length, 4, [1.0] * length) == whole
    assert snapkv_keep_indices(length, length + 1, [1.0] * length, min_tokens=0) == (
        whole
    )


def test_one_row_beyond_min_tokens_is_cut_to_the_budget():
    scores = [0.0] * 129
    assert len(snapkv_keep_indices(128, 16, scores)) == 128
    assert len(snapkv_keep_indices(129, 16, scores)) == 16
    assert len(snapkv_keep_indices(129, 128, scores)) == 128


def test_the_budget_binds_even_the_sinks():
    scores = [5.0] * 20
    facts = dict(min_tokens=0, sink_tokens=6)
    assert snapkv_keep_indices(20, 4, scores, **facts) == (0, 1, 2, 3)
    assert snapkv_keep_indices(20, 8, scores, recent_tokens=9, **facts) == (
        (*range(6), 18, 19)
    )


def test_no_recent_tokens_and_no_sinks_leave_the_scores_alone():
    scores = [3.0, 9.0, 1.0, 7.0, 0.0, 8.0, 2.0]
    kept = snapkv_keep_indices(
        7, 3, scores, sink_tokens=0, recent_tokens=0, min_tokens=0
    )
    assert kept == (1, 3, 5)


def test_ties_go_to_the_later_row():
    facts = dict(sink_tokens=1, recent_tokens=1, min_tokens=0)
    assert snapkv_keep_indices(10, 5, [1.0] * 10, **facts) == (0, 6, 7, 8, 9)
    zeros = [0.0, 0.0, -0.0, 0.0, -0.0, 0.0]
    assert snapkv_keep_indices(6, 4, zeros, **facts) == (0, 3, 4, 5)


@pytest.mark.parametrize("first", [float("nan"), -float("inf")])
@pytest.mark.parametrize("second", [float("nan"), -float("inf")])
def test_nan_counts_like_minus_infinity(first, second):
    scores = [0.0, first, second, -1e30, first, second, 0.0]
    facts = dict(sink_tokens=1, recent_tokens=1, min_tokens=0)
    assert snapkv_keep_indices(7, 3, scores, **facts) == (0, 3, 6)
    assert snapkv_keep_indices(7, 5, scores, **facts) == (0, 3, 4, 5, 6)


@pytest.mark.parametrize(
    "given_as",
    [
        list,
        tuple,
        np.array,
        lambda x: np.array(x, np.float32),
        lambda x: np.array(x, np.float16),
        lambda x: np.array(x, int),
        mx.array,
        lambda x: mx.array(x, mx.float16),
        lambda x: mx.array(x, mx.bfloat16),
        lambda x: mx.array(x, mx.int32),
    ],
)
def test_scores_of_any_kind(given_as):
    scores = [float(x) for x in np.random.default_rng(0).integers(-20, 20, 50)]
    kept = snapkv_keep_indices(50, 16, given_as(scores), min_tokens=0)
    assert kept == expected(50, 16, scores, min_tokens=0)
    assert all(type(row) is int for row in kept)


@pytest.mark.parametrize("given_as", [list, np.array, mx.array])
def test_scores_beyond_the_sequence_are_ignored(given_as):
    scores = [1.0, 2.0, 3.0, 0.0, 4.0, 0.0]
    facts = dict(sink_tokens=1, recent_tokens=1, min_tokens=0)
    short = snapkv_keep_indices(6, 4, given_as(scores), **facts)
    longer = snapkv_keep_indices(6, 4, given_as(scores + [1e9] * 5), **facts)
    assert short == longer == (0, 2, 4, 5)


def test_numpy_counts_are_integers():
    kept = snapkv_keep_indices(
        np.int64(20), np.int32(8), [0.0] * 20, min_tokens=np.int64(0)
    )
    assert kept == snapkv_keep_indices(20, 8, [0.0] * 20, min_tokens=0)


@pytest.mark.parametrize("given_as", [list, np.array, mx.array])
def test_too_few_scores_are_refused(given_as):
    with pytest.raises(ValueError):
        snapkv_keep_indices(300, 16, given_as([0.0] * 299))


@pytest.mark.parametrize("scores", [np.zeros((1, 300)), mx.zeros((300, 1))])
def test_scores_of_two_dimensions_are_refused(scores):
    with pytest.raises(ValueError):
        snapkv_keep_indices(300, 16, scores)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(seq_len=-1),
        dict(seq_len=300.0),
        dict(seq_len=True),
        dict(seq_len="300"),
        dict(seq_len=None),
        dict(budget=0),
        dict(budget=-3),
        dict(budget=16.0),
        dict(budget=True),
        dict(budget=None),
        dict(sink_tokens=-1),
        dict(sink_tokens=4.0),
        dict(sink_tokens=True),
        dict(recent_tokens=-1),
        dict(recent_tokens=1.5),
        dict(recent_tokens=False),
        dict(min_tokens=-1),
        dict(min_tokens=0.0),
        dict(min_tokens=False),
    ],
    ids=str,
)
def test_wrong_counts_are_refused(wrong):
    facts = dict(seq_len=300, budget=16, scores=[0.0] * 300)
    with pytest.raises(ValueError):
        snapkv_keep_indices(**{**facts, **wrong})


def check_columns(columns, scores, budget, padding, **facts):
    """Each head against the rows of its sequence alone, behind its padding."""
    B, H, T = scores.shape
    assert columns.dtype == mx.int32
    k = min(budget, T)
    assert columns.shape == (B, H, k)
    for got, own, pad in zip(np.array(columns), scores, padding):
        for head, row in zip(got, own):
            assert (np.diff(head) > 0).all() and (head >= 0).all()
            kept = expected(T - pad, budget, row[pad:], min_tokens=0, **facts)
            of_padding = k - len(kept)
            assert head[of_padding:].tolist() == [pad + i for i in kept]
            assert (head[:of_padding] < pad).all()


@st.composite
def batches(draw):
    B, H, T = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 40))
    flat = st.lists(ANY_SCORE, min_size=B * H * T, max_size=B * H * T)
    scores = np.array(draw(flat), np.float32).reshape(B, H, T)
    padding = draw(st.lists(st.integers(0, T), min_size=B, max_size=B))
    return scores, padding


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 45), COUNT, RECENT, st.booleans())
def test_columns_are_each_heads_rows(batch, budget, sinks, recent, guarantee):
    scores, padding = batch
    facts = dict(sink_tokens=sinks, recent_tokens=recent, guarantee_sinks=guarantee)
    columns = snapkv_keep_columns(
        mx.array(scores), budget, left_padding=mx.array(padding), **facts
    )
    check_columns(columns, scores, budget, padding, **facts)
    unpadded = snapkv_keep_columns(mx.array(scores), budget, **facts)
    check_columns(unpadded, scores, budget, [0] * len(scores), **facts)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_columns_of_any_float(dtype):
    scores = mx.random.normal((2, 3, 200), key=mx.random.key(0)).astype(dtype)
    columns = snapkv_keep_columns(scores, 24, left_padding=mx.array([0, 150]))
    check_columns(columns, np.array(scores.astype(mx.float32)), 24, [0, 150])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_columns_of_loud_padding_are_not_chosen(bad):
    scores = np.zeros((2, 2, 60), np.float32)
    scores[1, :, :30] = bad
    columns = snapkv_keep_columns(mx.array(scores), 16, left_padding=mx.array([0, 30]))
    check_columns(columns, scores, 16, [0, 30])
    assert np.array(columns)[1].min() == 30


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_columns_of_nothing_but_one_value(bad):
    scores = np.full((2, 2, 50), bad, np.float32)
    columns = snapkv_keep_columns(mx.array(scores), 16, left_padding=mx.array([7, 45]))
    check_columns(columns, scores, 16, [7, 45])


def test_columns_under_compile_take_padding_as_an_argument():
    def choose(scores, padding):
        return snapkv_keep_columns(scores, 16, left_padding=padding)

    compiled = mx.compile(choose)
    scores = mx.random.normal((3, 2, 50), key=mx.random.key(1))
    for padding in ([0, 0, 0], [3, 0, 45], [50, 34, 35]):
        columns = compiled(scores, mx.array(padding))
        check_columns(columns, np.array(scores), 16, padding)


def test_columns_under_compile_without_padding():
    scores = mx.random.normal((1, 2, 50), key=mx.random.key(2))
    columns = mx.compile(lambda x: snapkv_keep_columns(x, 16))(scores)
    check_columns(columns, np.array(scores), 16, [0])


def test_columns_agree_with_rows():
    scores = mx.random.normal((1, 4, 300), key=mx.random.key(3))
    columns = np.array(snapkv_keep_columns(scores, 32, recent_tokens=6))
    for head, row in zip(columns[0], scores[0]):
        rows = snapkv_keep_indices(300, 32, row, recent_tokens=6)
        assert rows == tuple(head.tolist())
