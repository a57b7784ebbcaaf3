"""What one query's selection covers, held against plain NumPy sums."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oracle
from mlx_sinks import SinkPolicy
from mlx_sinks.probing.coverage import METRICS, row_coverage
from strategies import examples

SPECIAL = [np.nan, np.inf, -np.inf, 0.0, 1.0, -1.0]
CLOSE = 1e-5


# ---------------------------------------------------------------- the oracle


def bounds(values, ranks, forced, shown, k):
    """Least and most of ``values`` on a selection: of tied scores any may be in it."""
    forced = {c for c in range(len(ranks)) if forced[c]}
    rest = [c for c in range(len(ranks)) if shown[c] and c not in forced]
    free = min(k - len(forced), len(rest))
    sure = sum(values[c] for c in forced)
    if free == 0:
        return sure, sure
    threshold = sorted((ranks[c] for c in rest), reverse=True)[free - 1]
    above = [c for c in rest if ranks[c] > threshold]
    tied = sorted(values[c] for c in rest if ranks[c] == threshold)
    sure += sum(values[c] for c in above)
    picked = free - len(above)
    return sure + sum(tied[:picked]), sure + sum(tied[-picked:])


def expected(scores, attention, k, policy, f, shown):
    """Each of ``METRICS`` as (least, most); NaN where there is nothing to share."""
    T = len(scores)
    ranks = oracle.rank(scores, exact_infinities=False)
    recency = oracle.clamped_recency(policy.sinks, policy.recency, k)

    def wanted(sinks, recency):
        row = oracle.forced_columns(sinks, recency, 1, 1, T, [f], shown)
        return row[0, 0, 0]

    nothing = wanted(0, 0)
    weight = attention.mean(axis=0)
    best = sorted((weight[c] for c in range(T)), reverse=True)
    chance = min(1.0, k / shown.sum())
    figures = {
        "mass": bounds(weight, ranks, nothing, shown, k),
        "mass_guaranteed": bounds(
            weight, ranks, wanted(policy.sinks, recency), shown, k
        ),
        "mass_best": (sum(best[:k]),) * 2,
        "mass_chance": (chance,) * 2,
    }
    for name, columns in [
        ("sinks_kept", wanted(policy.sinks, 0)),
        ("recency_kept", wanted(0, recency)),
    ]:
        count = columns.sum()
        least, most = bounds(columns.astype(float), ranks, nothing, shown, k)
        figures[name] = (least / count, most / count) if count else (np.nan,) * 2
    return figures


def covered(scores, attention, k, policy, f=None, shown=None):
    figures = row_coverage(
        mx.array(scores, mx.float32).reshape(1, 1, 1, -1),
        mx.array(attention, mx.float32),
        k,
        policy,
        None if f is None else mx.array([f]),
        None if shown is None else mx.array(shown).reshape(1, 1, 1, -1),
    )
    assert figures.shape == (len(METRICS),)
    assert figures.dtype == mx.float32
    return dict(zip(METRICS, figures.tolist()))


@st.composite
def rows(draw, policy=None):
    """A query's scores and attention, with columns hidden at the left and elsewhere."""
    T = draw(st.integers(3, 24))
    k = draw(st.integers(1, T - 1))
    if policy is None:
        sinks = draw(st.integers(0, k - 1))
        policy = SinkPolicy(sinks, draw(st.integers(0, k - sinks)))
    f = draw(st.integers(0, T // 2))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    shown = np.arange(T) >= f
    if draw(st.booleans()):
        shown &= rng.random(T) < 0.8
    shown[-1] = True  # a query sees itself
    kind = draw(st.sampled_from(["distinct", "ties", "special"]))
    scores = {
        "distinct": rng.permutation(T) - T / 2,
        "ties": rng.integers(-1, 2, T).astype(float),
        "special": rng.choice(SPECIAL, T),
    }[kind]
    attention = np.where(shown, rng.exponential(size=(3, T)), 0)
    attention /= attention.sum(axis=1, keepdims=True)
    return scores, attention, k, policy, f, shown


# ---------------------------------------------------------------- properties


@pytest.mark.parametrize("name", METRICS)
@examples(150)
@given(row=rows())
def test_against_the_oracle(name, row):
    figure, (least, most) = covered(*row)[name], expected(*row)[name]
    if np.isnan(least):
        assert np.isnan(figure)
    else:
        assert least - CLOSE <= figure <= most + CLOSE


@examples(150)
@given(rows())
def test_nothing_exceeds_the_best(row):
    figures = covered(*row)
    for name in ("mass", "mass_guaranteed", "mass_chance"):
        assert 0 <= figures[name] <= figures["mass_best"] + CLOSE
    assert figures["mass_best"] <= 1 + CLOSE


@examples(150)
@given(rows(SinkPolicy(0, 0)))
def test_the_empty_policy_guarantees_what_scores_choose(row):
    figures = covered(*row)
    assert figures["mass_guaranteed"] == figures["mass"]
    assert np.isnan([figures["sinks_kept"], figures["recency_kept"]]).all()


# ---------------------------------------------------------------- examples

# Ten columns, four slots: scores want the middle, attention the first and the last.
SCORES = np.array([0, 1, 2, 9, 8, 7, 6, 5, 4, 3.0])
ATTENTION = np.array([[5, 1, 0, 0, 1, 0, 0, 0, 1, 2.0], [3, 1, 0, 0, 1, 0, 0, 0, 3, 2]])
ATTENTION /= 10


def test_scores_that_lose_what_attention_wants():
    figures = covered(SCORES, ATTENTION, 4, SinkPolicy(1, 2))
    assert figures == pytest.approx(
        {
            "sinks_kept": 0.0,
            "recency_kept": 0.0,
            "mass": 0.1,  # 3 4 5 6
            "mass_guaranteed": 0.8,  # 0 8 9, and 3
            "mass_best": 0.9,  # 0 8 9, and 1 or 4
            "mass_chance": 0.4,
        }
    )


def test_the_best_is_one_selection_for_all_heads():
    """Not each head's own: heads share what an indexer selects."""
    figures = covered([3.0, 2, 1], np.eye(3)[:2], 1, SinkPolicy(0, 0))
    assert figures["mass_best"] == pytest.approx(0.5)


def test_shares_of_what_the_policy_would_force():
    figures = covered(SCORES, ATTENTION, 8, SinkPolicy(3, 4))
    assert figures["sinks_kept"] == pytest.approx(1 / 3)
    assert figures["recency_kept"] == pytest.approx(1)


def test_sinks_begin_at_the_left_padding():
    shown = np.arange(10) >= 3
    attention = np.where(shown, 1 / 7, 0)[None]
    figures = covered(SCORES, attention, 4, SinkPolicy(2, 1), 3, shown)
    assert figures["sinks_kept"] == pytest.approx(1)
    assert figures["mass_chance"] == pytest.approx(4 / 7)


def test_a_high_score_in_a_hidden_column_wins_nothing():
    shown = np.arange(10) != 3
    attention = np.where(shown, ATTENTION, 0)
    figures = covered(SCORES, attention, 4, SinkPolicy(0, 3), None, shown)
    assert figures["mass"] == pytest.approx(0.1)  # 4 5 6 7
    assert figures["recency_kept"] == pytest.approx(1 / 3)


def test_everything_is_covered_where_all_that_is_visible_fits():
    shown = np.arange(10) >= 7
    attention = np.where(shown, 1 / 3, 0)[None]
    figures = covered(SCORES, attention, 4, SinkPolicy(2, 2), 7, shown)
    assert figures == pytest.approx(dict.fromkeys(METRICS, 1.0))


@pytest.mark.parametrize(
    ("policy", "unasked"),
    [(SinkPolicy(0, 2), "sinks_kept"), (SinkPolicy(2, 0), "recency_kept")],
)
def test_a_share_of_nothing_is_nan(policy, unasked):
    figures = covered(SCORES, ATTENTION, 4, policy)
    assert [name for name in METRICS if np.isnan(figures[name])] == [unasked]


def test_nan_scores_lose_and_infinite_ones_win():
    scores = SCORES.copy()
    scores[[3, 4]] = np.nan, -np.inf
    scores[0] = np.inf
    figures = covered(scores, ATTENTION, 4, SinkPolicy(1, 1))
    assert figures["sinks_kept"] == 1
    assert figures["mass"] == pytest.approx(0.4)  # 0 5 6 7


def test_recency_is_what_the_sinks_leave_room_for():
    figures = covered(SCORES, ATTENTION, 4, SinkPolicy(1, 64))
    assert figures["recency_kept"] == pytest.approx(0)  # of 7 8 9
    assert figures["mass_guaranteed"] == pytest.approx(0.8)
