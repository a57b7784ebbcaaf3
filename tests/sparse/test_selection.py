"""The guarantee, held against an oracle: examples, then properties."""

import itertools
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import BatchKVCache, KVCache

import oracle
from lines import heard
from mlx_sinks import SinkPolicy
from mlx_sinks.sparse.selection import is_watched, select_columns, watching
from strategies import (
    DTYPES,
    FINITE,
    LARGEST,
    Case,
    cases,
    causal,
    examples,
    row_sets,
    select,
    to_mlx,
    to_numpy,
)
from threads import lasting

# ------------------------------------------------------------- selection, by hand


def chosen(scores, k, policy, left_padding=None, mask=None, dtype="float32"):
    """The columns of one query, for scores (T,) and mask (T,)."""
    columns = select(
        to_mlx(scores, dtype)[None, None, None],
        k,
        policy,
        None if left_padding is None else mx.array([left_padding]),
        None if mask is None else mx.array(np.array(mask, dtype=bool))[None],
    )
    assert columns.shape == (1, 1, 1, k)
    return sorted(columns[0, 0, 0].tolist())


@pytest.mark.parametrize("dtype", DTYPES)
class TestByHand:
    def test_sinks_and_recency_survive_low_scores(self, dtype):
        scores = [-9, -9, 5, 4, 3, 2, 1, -9]
        assert chosen(scores, 5, SinkPolicy(2, 1), dtype=dtype) == [0, 1, 2, 3, 7]

    def test_forced_columns_with_high_scores_take_one_slot_each(self, dtype):
        scores = [9, 8, 1, 2, 3, 4, 7, 6]
        assert chosen(scores, 5, SinkPolicy(2, 1), dtype=dtype) == [0, 1, 5, 6, 7]

    def test_forced_columns_survive_infinite_rivals(self, dtype):
        scores = [-np.inf, np.nan, np.inf, np.inf, np.inf, np.inf, np.inf, -np.inf]
        assert set(chosen(scores, 4, SinkPolicy(2, 1), dtype=dtype)) > {0, 1, 7}

    def test_forced_columns_can_fill_the_selection(self, dtype):
        scores = [-1, np.inf, np.inf, np.inf, -1, -1]
        assert chosen(scores, 3, SinkPolicy(1, 2), dtype=dtype) == [0, 4, 5]

    def test_recency_is_clamped_and_sinks_stay(self, dtype):
        scores = [-1, -1, 9, 9, 9, -1]
        assert chosen(scores, 3, SinkPolicy(2, 5), dtype=dtype) == [0, 1, 5]

    @pytest.mark.parametrize("nan", [np.nan, -np.nan], ids=["nan", "negative nan"])
    def test_nan_counts_as_the_lowest(self, dtype, nan):
        scores = [nan, 1, nan, 2, -LARGEST[dtype] / 2, np.nan]
        assert chosen(scores, 3, SinkPolicy(0, 0), dtype=dtype) == [1, 3, 4]

    def test_a_visible_nan_outranks_a_hidden_column(self, dtype):
        scores = [9, np.nan, 9, -np.inf, 9, -LARGEST[dtype], np.inf, 1]
        mask = [0, 1, 0, 1, 0, 1, 0, 1]
        policy = SinkPolicy(0, 0)
        assert chosen(scores, 4, policy, mask=mask, dtype=dtype) == [1, 3, 5, 7]

    def test_hidden_columns_fill_what_is_left(self, dtype):
        scores = [9, np.nan, 9, -np.inf, 9, 0, np.inf, 1]
        mask = [0, 1, 0, 1, 0, 0, 0, 0]
        policy = SinkPolicy(1, 1)
        assert set(chosen(scores, 4, policy, mask=mask, dtype=dtype)) > {1, 3}

    def test_a_hidden_sink_takes_no_slot(self, dtype):
        scores = [9, 9, 1, 2, 3, 4, 5]
        mask = [0, 0, 1, 1, 1, 1, 1]
        policy = SinkPolicy(2, 1)
        assert chosen(scores, 3, policy, mask=mask, dtype=dtype) == [4, 5, 6]

    def test_sinks_follow_the_padding(self, dtype):
        scores = [9, 9, -1, -1, 5, 4, 3, 2]
        mask = [0, 0, 1, 1, 1, 1, 1, 1]
        policy = SinkPolicy(2, 1)
        assert chosen(scores, 4, policy, 2, mask, dtype) == [2, 3, 4, 7]


def test_infinities_are_exact_in_half_precision():
    for dtype in ("float16", "bfloat16"):
        top, policy = LARGEST[dtype], SinkPolicy(0, 0)
        scores = [top, np.inf, top, 1, np.inf, top]
        assert chosen(scores, 2, policy, dtype=dtype) == [1, 4]
        scores = [-top, np.nan, -top, -np.inf, -np.inf, -top]
        assert chosen(scores, 3, policy, dtype=dtype) == [0, 2, 5]


def test_neighbouring_values_are_told_apart():
    one_up = np.nextafter(np.float32(1), np.float32(2))
    scores = np.where(np.arange(12) % 3 == 1, one_up, np.float32(1))
    assert chosen(scores, 4, SinkPolicy(0, 0)) == [1, 4, 7, 10]
    below_top = np.nextafter(np.float32(LARGEST["float32"]), np.float32(0))
    scores = np.where(np.arange(12) % 3 == 1, LARGEST["float32"], below_top)
    assert chosen(scores, 4, SinkPolicy(0, 0)) == [1, 4, 7, 10]
    assert chosen(-scores, 8, SinkPolicy(0, 0)) == [0, 2, 3, 5, 6, 8, 9, 11]


def test_without_a_mask_later_columns_compete_but_are_not_forced():
    scores = to_mlx([[[[0, 1, 9, 2, 9, 9], [0, 1, 9, 2, 9, -1]]]])
    columns = select(scores, 3, SinkPolicy(1, 1))
    first, second = row_sets(columns)[0]
    assert first > {0, 4} and first - {0, 4} <= {2, 5}
    assert second >= {0, 5} and second - {0, 5} <= {2, 4}


# ----------------------------------------------------------- selection, in general


@given(cases(sparse=False))
@examples(150)
def test_dense_up_to_topk(case):
    dense = case.k >= case.T
    assert (select(*case.arguments()) is None) == dense


@pytest.mark.parametrize("T", [1, 7, 8, 9])
def test_dense_at_topk_and_sparse_above(T):
    columns = select(to_mlx(np.zeros((2, 1, 1, T))), 8, SinkPolicy(2, 3))
    assert (columns is None) == (T <= 8)


@given(cases())
@examples(1200)
def test_selection_keeps_the_contract(case):
    assert case.faults(select(*case.arguments())) == []


def one_row_floats(dtype):
    width = 16 if dtype == "float16" else 32
    values = st.floats(width=width) | st.sampled_from(
        [np.nan, np.inf, -np.inf, LARGEST[dtype], -LARGEST[dtype], 0.0, -0.0]
    )
    return st.lists(values, min_size=2, max_size=12)


@given(st.data())
@examples(500)
def test_selection_keeps_the_contract_on_one_row(data):
    dtype = data.draw(st.sampled_from(list(DTYPES)))
    values = data.draw(one_row_floats(dtype))
    T = len(values)
    k = data.draw(st.integers(1, T - 1))
    sinks = data.draw(st.integers(0, k - 1))
    recency = data.draw(st.integers(0, k + 1))
    left = data.draw(st.none() | st.integers(0, T).map(lambda f: (f,)))
    shown = data.draw(st.none() | st.lists(st.booleans(), min_size=T, max_size=T))

    # A float32 that is too large for bfloat16 rounds to an infinity; the oracle
    # sees what the selection sees.
    scores = to_mlx(values, dtype)[None, None, None]
    mask = None if shown is None else np.array([shown])
    columns = select(
        scores,
        k,
        SinkPolicy(sinks, recency),
        None if left is None else mx.array(left),
        None if mask is None else mx.array(mask),
    )
    recency = oracle.clamped_recency(sinks, recency, k)
    faults = oracle.selection_faults(
        columns,
        oracle.rank(to_numpy(scores), dtype != "float32"),
        k,
        oracle.forced_columns(sinks, recency, 1, 1, T, left, mask),
        oracle.shown_columns(1, 1, T, mask),
    )
    assert faults == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["normal", "ties", "mixed", "bits"])
@pytest.mark.parametrize("L", [1, 5])
def test_selection_keeps_the_contract_on_a_long_buffer(dtype, kind, L):
    T, left = 2500, (0, 700)
    case = Case(2, L, T, 512, 4, 64, dtype, kind, 3, left, None, "left")
    assert case.faults(select(*case.arguments())) == []


@given(cases(), st.sampled_from([np.nan, -np.inf, -1.0]))
@examples(200)
def test_no_forced_column_is_ever_missing(case, low):
    _, k, policy, left_padding, mask = case.arguments()
    scores = to_mlx(np.where(case.forced, low, np.inf), case.dtype)
    columns = select(scores, k, policy, left_padding, mask)
    kept = np.zeros(case.forced.shape, dtype=bool)
    np.put_along_axis(kept, columns.astype(np.int64), True, axis=-1)
    assert not (case.forced & ~kept).any()


@given(cases(), st.integers(0, 5))
@examples(60)
def test_sinks_that_leave_no_slot_are_refused(case, excess):
    case = replace(case, sinks=case.k + excess)
    with pytest.raises(ValueError) as error:
        select(*case.arguments())
    assert str(case.sinks) in str(error.value) and str(case.k) in str(error.value)


def test_clamping_is_said_once_by_the_selection():
    scores, policy = to_mlx(np.zeros((1, 1, 1, 10))), SinkPolicy(3, 999_983)
    with heard() as lines:
        select_columns(scores, 9, policy)
        assert len(lines) == 1
        select_columns(scores, 9, policy)
    assert len(lines) == 1


@given(cases())
@examples(100)
def test_arguments_are_left_alone(case):
    scores, k, policy, left_padding, mask = case.arguments()
    select(scores, k, policy, left_padding, mask)
    assert np.array_equal(to_numpy(scores), to_numpy(case.scores), equal_nan=True)
    assert mask is None or np.array_equal(np.array(mask), case.mask)
    assert left_padding is None or left_padding.tolist() == list(case.left)


@given(cases())
@examples(100)
def test_memory_layout_does_not_matter(case):
    scores, *rest = case.arguments()
    strided = mx.contiguous(scores.swapaxes(-1, -2)).swapaxes(-1, -2)
    assert case.faults(select(strided, *rest)) == []


# ----------------------------------------------------------------- beside upstream


def upstream_selection(scores, k, mask):
    """The last lines of mlx_lm.models.deepseek_v32.Indexer.__call__."""
    if mask is not None:
        scores = mx.where(mask, scores, -float("inf"))
    return np.array(mx.argpartition(scores, kth=-k, axis=-1)[..., -k:])


@given(cases(kinds=FINITE))
@examples(400)
def test_no_policy_is_upstream_selection(case):
    case = replace(case, sinks=0, recency=0)
    scores, k, policy, left_padding, mask = case.arguments()
    ours = select(scores, k, policy, left_padding, mask)
    theirs = upstream_selection(scores, k, mask)
    assert ours.shape == theirs.shape

    # Which hidden columns fill up is free, and so is which of two equals is taken.
    shown, values = case.shown, to_numpy(scores)
    for b, i in itertools.product(range(case.B), range(case.L)):
        visible = shown[b, 0, i]
        our_row = {c for c in ours[b, 0, i].tolist() if visible[c]}
        their_row = {c for c in theirs[b, 0, i].tolist() if visible[c]}
        if len(set(values[b, 0, i].tolist())) == case.T:
            assert our_row == their_row
        else:
            row = values[b, 0, i]
            assert sorted(row[list(our_row)]) == sorted(row[list(their_row)])


@given(cases())
@examples(150)
def test_masks_of_create_causal_mask(case):
    left = case.left or (0,) * case.B
    right = case.right or tuple(reversed(left))
    kinds = {
        "causal": {},
        "left": dict(left_padding=mx.array(left)),
        "left and right": dict(
            left_padding=mx.array(left), right_padding=mx.array(right)
        ),
    }
    for mask_kind, padding in kinds.items():
        mask = create_causal_mask(case.L, case.T - case.L, **padding)
        same = replace(case, left=left, right=right, mask_kind=mask_kind)
        assert np.array_equal(np.array(mask), same.mask)
        scores, k, policy, left_padding, _ = same.arguments()
        assert same.faults(select(scores, k, policy, left_padding, mask)) == []


def feed(cache, B, L):
    """Append L columns as a layer does, and return the mask it attends with."""
    mask = cache.make_mask(L, return_array=True, window_size=None)
    keys = mx.zeros((B, 1, L, 1))
    cache.update_and_fetch(keys, keys)
    return mask


@pytest.mark.parametrize("left", [None, (4, 0, 9)], ids=["single", "batch"])
def test_a_cache_from_prefill_to_decode(left):
    cache = BatchKVCache(list(left)) if left else KVCache()
    B, T = len(left or [0]), 0
    for seed, L in enumerate([6, 5, 1, 1, 3]):
        mask = feed(cache, B, L)
        T += L
        kind = "left" if left else "none" if mask is None else "causal"
        case = Case(B, L, T, 5, 2, 2, seed=seed, left=left, mask_kind=kind)
        assert np.array_equal(np.array(mask), case.mask)  # both None, or one array
        scores, k, policy, _, _ = case.arguments()
        columns = select(scores, k, policy, left and cache.left_padding, mask)
        assert case.faults(columns) == []


# ---------------------------------------------------------------- batch and tracing


@given(cases(kinds=["distinct"]), st.sampled_from([np.nan, np.inf, -np.inf, 0.5]))
@examples(300)
def test_batch_equals_each_sequence_alone(case, padding_score):
    B, L, T, k = case.B, case.L, case.T, case.k
    left = case.left or (0,) * B
    case = replace(case, left=left, mask_kind="left")
    in_padding = np.arange(T) < np.reshape(left, (B, 1, 1, 1))
    values = np.where(in_padding, padding_score, to_numpy(case.scores))
    shown = case.shown
    _, _, policy, left_padding, mask = case.arguments()
    batch = select(to_mlx(values, case.dtype), k, policy, left_padding, mask)

    for b, f in enumerate(left):
        real = min(L, T - f)
        if real == 0:
            continue
        mine = to_mlx(values[b : b + 1, :, L - real :, f:], case.dtype)
        masks = [mx.array(causal(real, T - f))] + ([None] if real == 1 else [])
        for alone_mask in masks:
            alone = select(mine, k, policy, None, alone_mask)
            for i in range(L - real, L):
                visible = set(np.flatnonzero(shown[b, 0, i]).tolist())
                in_batch = set(batch[b, 0, i].tolist()) & visible
                if alone is None:
                    assert in_batch == visible
                else:
                    row = alone[0, 0, i - (L - real)].tolist()
                    assert in_batch == {c + f for c in row} & visible


@given(cases())
@examples(40)
def test_traced_selection_equals_untraced(case):
    """Every array is an input of the graph."""
    scores, k, policy, *rest = case.arguments()
    traced = mx.compile(lambda scores, rest: select_columns(scores, k, policy, *rest))
    columns = np.array(traced(scores, rest))
    assert case.faults(columns) == []
    assert row_sets(columns) == row_sets(select(*case.arguments()))


# -------------------------------------------------------------- the oracle is awake


@given(cases(kinds=["distinct"]), st.randoms(use_true_random=False))
@examples(100)
def test_the_oracle_sees_one_exchanged_column(case, random):
    """Of distinct scores, no exchange of a visible column for another is allowed."""
    case = replace(case, B=1, L=1, left=case.left and case.left[:1], right=None)
    case = replace(case, mask_kind="none")
    row = case.ranks[0, 0, 0]
    forced_row = case.forced[0, 0, 0]
    order = sorted(range(case.T), key=lambda c: (forced_row[c], row[c]))
    best, rest = order[-case.k :], order[: -case.k]
    assert case.faults(np.array(best)[None, None, None]) == []
    best[random.randrange(case.k)] = random.choice(rest)
    assert case.faults(np.array(best)[None, None, None]) != []


# ------------------------------------------------------------------ who watches

SCORES = mx.random.normal((2, 1, 3, 9), key=mx.random.key(0))


def test_a_watcher_gets_what_a_selection_chooses_from():
    seen = []
    padding, mask = mx.array([0, 2]), mx.ones((3, 9), mx.bool_)
    with watching(lambda *chosen_from: seen.append(chosen_from)):
        assert is_watched()
        columns = select_columns(SCORES, 4, SinkPolicy(1, 2), padding, mask)
        assert select_columns(SCORES, 9, SinkPolicy(2, 3)) is None
        select_columns(SCORES, 8, SinkPolicy(0, 0))
    assert not is_watched()
    select_columns(SCORES, 4, SinkPolicy(1, 1))
    first, second = seen
    assert all(got is given for got, given in zip(first, (SCORES, padding, mask)))
    assert second[0] is SCORES
    assert second[1:] == (None, None)
    unwatched = select_columns(SCORES, 4, SinkPolicy(1, 2), padding, mask)
    np.testing.assert_array_equal(np.array(columns), np.array(unwatched))


def test_a_watcher_is_gone_after_an_exception():
    with pytest.raises(ZeroDivisionError), watching(print):
        raise ZeroDivisionError
    assert not is_watched()


def test_watching_blocks_nest():
    outer, inner = [], []
    with watching(lambda *_: outer.append(1)):
        with watching(lambda *_: inner.append(1)):
            select_columns(SCORES, 4, SinkPolicy(1, 1))
        assert len(inner) == 1
        seen = len(outer)
        select_columns(SCORES, 4, SinkPolicy(1, 1))
    assert len(outer) == seen + 1
    assert len(inner) == 1


def test_watching_is_the_threads_own():
    seen = []

    def elsewhere():
        select_columns(SCORES, 4, SinkPolicy(1, 1))
        return is_watched()

    with watching(lambda *_: seen.append(1)):
        assert not lasting(elsewhere).result(60)
        assert is_watched()
    assert seen == []
