"""Scores by blocks of queries: the formula, whatever the blocks, in the memory given.

Most inputs are small whole numbers, whose sums are the same in any order, so that
scores and selections can be compared exactly.
"""

import sys
from dataclasses import dataclass, replace
from importlib.metadata import version

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

import oracle
from mlx_sinks import PolicyError, SinkPolicy
from mlx_sinks.sparse.blocks import default_memory
from mlx_sinks.sparse.scoring import IndexScores
from mlx_sinks.sparse.selection import select_columns, watching
from processes import run
from strategies import (
    DTYPES,
    Case,
    cases,
    examples,
    row_sets,
    select,
    to_mlx,
    to_numpy,
)

MIB, GIB = 2**20, 2**30
HUGE = 2**60
SPECIAL = [np.nan, np.inf, -np.inf]
ON_CPU = mx.default_device() == mx.cpu
# A GPU rounds products to the arrays' type, and may multiply float32 as TF32.
ROUNDING = {"float32": 2**-11, "float16": 2**-11, "bfloat16": 2**-8}


def formula(queries, keys, weights):
    """sum_h weight[b, i, h] * relu(query[b, h, i] . key[b, t]), in float64."""
    q, k, w = (to_numpy(a).astype(np.float64) for a in (queries, keys, weights))
    products = np.einsum("bhid,btd->bhit", q, k[:, 0])
    return np.einsum("bih,bhit->bit", w, np.maximum(products, 0))[:, None]


def rounding(queries, keys, weights):
    """What sums of D products, then of H heads, may be off by."""
    _, H, _, D = queries.shape
    kind = next(name for name, dtype in DTYPES.items() if dtype == queries.dtype)
    unit = 2**-24 if ON_CPU else ROUNDING[kind]
    return (D + H + 2) * unit * formula(*(mx.abs(a) for a in (queries, keys, weights)))


def normal(seed, B, H, L, T, D, dtype="float32", weights="float32"):
    rng = np.random.default_rng(seed)
    return (
        to_mlx(rng.standard_normal((B, H, L, D)), dtype),
        to_mlx(rng.standard_normal((B, 1, T, D)), dtype),
        to_mlx(rng.standard_normal((B, L, H)), weights),
    )


@dataclass(frozen=True)
class IndexedCase(Case):
    """One call whose scores come from queries and keys, in blocks."""

    H: int = 3
    memory: int = 1
    special: float = 0.0

    def inputs(self):
        rng = np.random.default_rng(self.seed)

        def numbers(*shape):
            values = rng.integers(-3, 4, shape)
            special = rng.choice(SPECIAL, shape)
            return np.where(rng.random(shape) < self.special, special, values)

        queries = to_mlx(numbers(self.B, self.H, self.L, 5), self.dtype)
        keys = to_mlx(numbers(self.B, 1, self.T, 5), self.dtype)
        return queries, keys, to_mlx(rng.integers(-8, 9, (self.B, self.L, self.H)) / 8)

    @property
    def scores(self):
        return IndexScores(*self.inputs(), self.memory)

    @property
    def whole(self):
        return self.scores.block(slice(0, self.L))

    @property
    def ranks(self):
        return oracle.rank(to_numpy(self.whole), exact_infinities=False)


@st.composite
def indexed(draw, special=(0.0,), sparse=True):
    case = draw(cases(kinds=["normal"], sparse=sparse))
    H = draw(st.sampled_from([1, 2, 7, 24]))
    enough = 32 * case.B * case.L * case.T * H
    memory = draw(st.sampled_from([1, HUGE]) | st.integers(1, enough))
    return IndexedCase(
        **vars(case), H=H, memory=memory, special=draw(st.sampled_from(special))
    )


class Watched:
    """Scores that remember which queries they were asked for."""

    def __init__(self, scores):
        self.scores, self.asked = scores, []
        self.shape, self.rows = scores.shape, scores.rows

    def block(self, rows):
        self.asked.append(list(range(self.shape[2]))[rows])
        return self.scores.block(rows)


# ------------------------------------------------------------------------- scores


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.data())
@examples(40)
def test_scores_are_the_formula(dtype, data):
    B = data.draw(st.integers(1, 3))
    H = data.draw(st.sampled_from([1, 2, 3, 24]))
    L = data.draw(st.integers(1, 9))
    T = data.draw(st.integers(L, 70))
    D = data.draw(st.sampled_from([1, 8, 33, 64]))
    weights = data.draw(st.sampled_from(["float32", dtype]))
    start = data.draw(st.integers(0, L - 1))
    rows = data.draw(st.just(slice(0, L)) | st.just(slice(start, start + 1)))
    seed = data.draw(st.integers(0, 2**32 - 1))
    inputs = normal(seed, B, H, L, T, D, dtype, weights)

    scores = IndexScores(*inputs, 1)
    block = scores.block(rows)
    assert scores.shape == (B, 1, L, T)
    assert block.dtype == mx.float32
    expected, tolerance = (f(*inputs)[:, :, rows] for f in (formula, rounding))
    assert block.shape == expected.shape
    assert (np.abs(to_numpy(block) - expected) <= tolerance).all()


def test_a_negative_product_counts_nothing_and_a_negative_weight_does():
    queries, keys = to_mlx([[[[1.0]], [[-1.0]]]]), to_mlx([[[[2.0], [-3.0], [0.0]]]])
    weights = to_mlx([[[0.5, -4.0]]])
    scores = IndexScores(queries, keys, weights, HUGE).block(slice(0, 1))
    assert scores.tolist() == [[[[1.0, -12.0, 0.0]]]]


@given(indexed(sparse=False), st.data())
@examples(100)
def test_blocks_are_the_rows_of_the_whole(case, data):
    start = data.draw(st.integers(0, case.L - 1))
    rows = slice(start, data.draw(st.integers(start + 1, case.L)))
    block = case.scores.block(rows)
    assert np.array_equal(to_numpy(block), formula(*case.inputs())[:, :, rows])


# ------------------------------------------------------------------------- blocks


def unevaluated(B, H, L, T, memory):
    shapes = (B, H, L, 8), (B, 1, T, 8), (B, L, H)
    return IndexScores(*(mx.zeros(shape) for shape in shapes), memory)


@given(
    st.integers(1, 3),
    st.sampled_from([1, 24, 64]),
    st.integers(1, 600),
    st.integers(1, 200_000),
    st.lists(st.integers(1, 2**34), min_size=2, max_size=2).map(sorted),
)
@examples(100)
def test_more_memory_is_more_rows(B, H, L, T, sizes):
    fewer, more = (unevaluated(B, H, L, T, memory).rows for memory in sizes)
    assert 1 <= fewer <= more <= L
    assert unevaluated(B, H, L, T, 1).rows == 1
    assert unevaluated(B, H, L, T, HUGE).rows == L
    for rows, memory in zip((fewer, more), sizes):
        assert rows == 1 or B * rows * H * T * 4 <= memory


@given(indexed())
@examples(100)
def test_each_query_is_scored_once_in_blocks_of_at_most_rows(case):
    scores, *rest = case.arguments()
    watched = Watched(scores)
    select(watched, *rest)
    assert sum(watched.asked, []) == list(range(case.L))
    assert max(map(len, watched.asked)) <= scores.rows


@pytest.mark.parametrize("T", [1, 7, 8])
def test_nothing_is_scored_where_all_columns_fit(T):
    scores = Watched(IndexScores(*normal(0, 2, 3, 1, T, 4), 1))
    assert select(scores, 8, SinkPolicy(2, 3)) is None
    assert scores.asked == []


def test_sinks_that_leave_no_slot_are_refused_before_anything_is_scored():
    scores = Watched(IndexScores(*normal(0, 1, 3, 4, 20, 4), 1))
    with pytest.raises(PolicyError, match="sinks=8"):
        select(scores, 8, SinkPolicy(8, 0))
    assert scores.asked == []


# ---------------------------------------------------------------------- selection


# A third of the cases have keys and queries that are no numbers.
@given(indexed(special=(*[0.0] * 8, 0.01, 0.05, 0.3, 1.0)))
@examples(600)
def test_blocks_select_what_the_whole_selects(case):
    scores, *rest = case.arguments()
    columns = select(scores, *rest)
    assert case.faults(columns) == []
    assert row_sets(columns) == row_sets(select(case.whole, *rest))


@pytest.mark.parametrize("shape", ["LT", "B1LT", "11LT", "B11T", "1T"])
@pytest.mark.parametrize("policy", [(0, 0), (2, 3), (3, 10**6)])
def test_each_mask_is_cut_to_its_block(shape, policy):
    case = IndexedCase(2, 5, 23, 7, *policy, left=(0, 9))
    case = replace(case, mask_kind="random", mask_shape=shape)
    whole = row_sets(select(case.whole, *case.arguments()[1:]))
    for memory, rows in ((1, {1}), (4_500, {2, 3, 4}), (HUGE, {5})):
        case = replace(case, memory=memory)
        assert case.scores.rows in rows
        columns = select(*case.arguments())
        assert case.faults(columns) == []
        assert row_sets(columns) == whole


@pytest.mark.parametrize("memory", [1, HUGE])
@pytest.mark.parametrize("value", SPECIAL)
def test_forced_columns_survive_keys_that_are_no_numbers(value, memory):
    queries, keys, weights = (mx.abs(a) for a in normal(0, 2, 3, 4, 30, 8))
    keys[:, :, :3] = value
    keys[:, :, -6:] = value
    scores = IndexScores(queries, keys, weights, memory)
    for sequence in row_sets(select(scores, 8, SinkPolicy(3, 3))):
        for query, chosen in enumerate(sequence):
            assert chosen >= {0, 1, 2, 24 + query, 25 + query, 26 + query}


@pytest.mark.parametrize("mask_kind", ["none", "left"])
@pytest.mark.parametrize("L", [1, 3])
def test_traced_selection_equals_untraced(L, mask_kind):
    left = None if mask_kind == "none" else (0, 9)
    case = IndexedCase(2, L, 23, 7, 2, 3, left=left, mask_kind=mask_kind)
    scores, k, policy, *rest = case.arguments()
    assert scores.rows == 1

    def call(inputs, rest):
        return select_columns(IndexScores(*inputs, 1), k, policy, *rest)

    traced = np.array(mx.compile(call)(case.inputs(), rest))
    assert case.faults(traced) == []
    assert row_sets(traced) == row_sets(select(*case.arguments()))


@given(indexed())
@examples(100)
def test_a_watcher_sees_all_the_scores_and_changes_nothing(case):
    arguments = case.arguments()
    left_padding, mask = arguments[-2:]
    seen = []
    with watching(lambda *what: seen.append(what)):
        columns = select(*arguments)
    [(scores, seen_padding, seen_mask)] = seen
    assert isinstance(scores, mx.array)
    assert np.array_equal(to_numpy(scores), formula(*case.inputs()))
    assert seen_padding is left_padding and seen_mask is mask
    assert row_sets(columns) == row_sets(select(*arguments))


# ------------------------------------------------------------------------- memory


# Blocks enough to be held side by side, were it possible. Without a policy less is
# done between their products.
@pytest.mark.parametrize("policy", [SinkPolicy(), SinkPolicy(0, 0)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("memory", "L"), [(16 * MIB, 45), (64 * MIB, 170)])
def test_a_selection_stays_within_its_memory(memory, L, dtype, policy):
    T = 8192
    inputs = normal(0, 1, 32, L, T, 64, dtype)
    mask = mx.arange(T) <= mx.arange(T - L, T)[:, None]
    scores = IndexScores(*inputs, memory)
    assert scores.rows <= L // 3
    mx.eval(inputs, mask)
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    columns = select_columns(scores, 512, policy, mask=mask)
    mx.eval(columns)
    held = mx.get_peak_memory() - before - columns.nbytes
    assert held <= memory


def test_a_cpu_has_32_mib():
    assert default_memory(mx.DeviceType.cpu) == 32 * MIB


@pytest.mark.parametrize(
    ("facts", "memory"),
    [
        ({"memory_size": 24 * GIB}, 384 * MIB),
        ({"total_memory": 24 * GIB}, 384 * MIB),
        ({"memory_size": 10**10}, 10**10 // 64),
        ({"memory_size": 4 * GIB}, 64 * MIB),
        ({"memory_size": GIB}, 32 * MIB),
        ({"memory_size": 64 * GIB}, GIB),
        ({"total_memory": 512 * GIB}, GIB),
        ({"device_name": "unknown"}, 32 * MIB),
    ],
)
def test_a_gpu_lends_a_64th_of_its_memory_but_no_extreme(monkeypatch, facts, memory):
    monkeypatch.setattr(mx, "device_info", lambda device: facts)
    # Past the cache, which keeps what the real device says.
    found = default_memory.__wrapped__(mx.DeviceType.gpu)
    assert found == memory and isinstance(found, int)


# ------------------------------------------------------------------------- recall


def upstream_scores(queries, keys, weights):
    """As in Indexer.__call__ of the installed mlx_lm.models.deepseek_v32."""
    scores = mx.maximum(queries @ keys.swapaxes(-1, -2), 0)
    scores = scores * weights.swapaxes(-1, -2)[..., None]
    if scores.shape[2] > 1 and Version(version("mlx-lm")) >= Version("0.32.0"):
        return sum(scores[:, h : h + 1] for h in range(scores.shape[1]))
    return scores.sum(axis=1, keepdims=True)


def best_sets(scores, k):
    return row_sets(np.argsort(scores, axis=-1)[..., -k:])


def recall(sets, best):
    pairs = [pair for seqs in zip(sets, best) for pair in zip(*seqs)]
    return np.mean([len(found & wanted) / len(wanted) for found, wanted in pairs])


@pytest.mark.parametrize("L", [1, 8])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_recall_is_at_least_upstreams(dtype, L):
    k, ours, upstreams = 128, [], []
    for seed in range(8):
        inputs = normal(seed, 1, 32, L, 1024, 64, dtype, dtype)
        best = best_sets(formula(*inputs), k)
        columns = select(IndexScores(*inputs, MIB), k, SinkPolicy(0, 0))
        ours.append(recall(row_sets(columns), best))
        scores = upstream_scores(*inputs)
        assert scores.dtype == DTYPES[dtype]
        upstreams.append(recall(best_sets(to_numpy(scores), k), best))
    assert np.mean(ours) >= np.mean(upstreams)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("L", [1, 8])
def test_float32_selects_the_best_but_for_ties_to_rounding(L, seed):
    k = 128
    inputs = normal(seed, 2, 32, L, 1024, 64)
    scores, tolerance = formula(*inputs), rounding(*inputs)
    columns = select(IndexScores(*inputs, MIB), k, SinkPolicy(0, 0))
    threshold = np.sort(scores, axis=-1)[..., -k, None]
    chosen = np.zeros(scores.shape, bool)
    np.put_along_axis(chosen, columns.astype(int), True, axis=-1)
    assert (chosen.sum(-1) == k).all()
    wrong = chosen != (scores >= threshold)
    assert (np.abs(scores - threshold) <= 2 * tolerance.max())[wrong].all()


# ---------------------------------------------------------------- transformations

FIRST_TRACED = """
import mlx.core as mx
from mlx_sinks import SinkPolicy
from mlx_sinks.sparse.scoring import IndexScores
from mlx_sinks.sparse.selection import select_columns

def select(B, L, padding, memory):
    keys = mx.arange(20, 0, -1).astype(mx.float32).reshape(1, 1, 20, 1)
    queries, weights = mx.ones((B, 1, L, 1)), mx.ones((B, L, 1))
    scores = IndexScores(queries, mx.repeat(keys, B, axis=0), weights, memory)
    mask = mx.ones((1, 20), mx.bool_)
    padding = padding and mx.array(padding)
    return select_columns(scores, 8, SinkPolicy(2, 2), padding, mask)

mx.eval({transformation}(lambda x: select(1, 4, None, 1) + x)(mx.array(0, mx.uint32)))
print([sorted(row) for row in select(2, 4, [0, 18], 2**20)[1, 0].tolist()])
"""


@pytest.mark.parametrize("transformation", ["mx.compile", "mx.checkpoint"])
def test_a_first_trace_leaves_nothing_behind(transformation):
    """In a process that has selected nothing before; one row's shapes are special."""
    code = FIRST_TRACED.format(transformation=transformation)
    outcome = run(sys.executable, "-c", code)
    assert outcome.status == 0, outcome.stderr
    rows = [[0, 1, 2, 3, 4, 5, 6, 7]] * 2
    rows += [[0, 1, 2, 3, 4, 5, 6, 18], [0, 1, 2, 3, 4, 5, 18, 19]]
    assert outcome.stdout == f"{rows}\n"


@pytest.mark.skipif(
    Version(version("mlx")) < Version("0.32"), reason="its argpartition has no vmap"
)
@pytest.mark.parametrize("L", [1, 3])
def test_each_of_a_vmap_is_selected_from(L):
    scores = mx.broadcast_to(-mx.arange(12.0), (3, 2, 1, L, 12))
    mask = None if L == 1 else mx.ones((L, 12), mx.bool_)
    selected = mx.vmap(lambda x: select_columns(x, 4, SinkPolicy(0, 2), None, mask))
    one = row_sets(np.array(select_columns(scores[0], 4, SinkPolicy(0, 2), None, mask)))
    assert [row_sets(each) for each in np.array(selected(scores))] == [one] * 3
