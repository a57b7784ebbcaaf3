"""SinkPolicy, what fits a model of it, and its forms in the environment."""

import itertools
from dataclasses import FrozenInstanceError, replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lines import heard
from mlx_sinks import PolicyError, SinkPolicy
from mlx_sinks.policy import Settings
from mlx_sinks.targets import TARGETS
from strategies import examples

# ------------------------------------------------------------------------- policy


def test_policy_defaults():
    assert SinkPolicy() == SinkPolicy(sinks=4, recency=None)
    assert SinkPolicy(0, 0) == SinkPolicy(sinks=0, recency=0)


def test_policy_is_frozen_and_hashable():
    policy = SinkPolicy()
    with pytest.raises(FrozenInstanceError):
        policy.sinks = 1
    assert hash(policy) == hash(SinkPolicy())
    assert replace(policy, sinks=1) == SinkPolicy(1)


NO_COUNTS = [-1, -(10**9), 1.5, 4.0, float("nan"), True, False, "4", "", [4]]
REFUSED = {
    "sinks": [*NO_COUNTS, None],
    "recency": NO_COUNTS,
    "scoring": ["x", "", "Blocks", None, True, 1, ["blocks"]],
    "score_memory": [0, -1, 1.5, 1e9, True, False, "512MB", "1", [1]],
    "sparse_from": [0, -1, 1.5, True, "4096", [1]],
}


@pytest.mark.parametrize(
    ("field", "value"), [(f, v) for f, values in REFUSED.items() for v in values]
)
def test_policy_refuses_what_a_field_can_not_be(field, value):
    with pytest.raises(PolicyError, match=field):
        SinkPolicy(**{field: value})


@given(st.integers(0, 10**6), st.integers(0, 10**6))
@examples(50)
def test_policy_takes_every_count(sinks, recency):
    policy = SinkPolicy(sinks, recency)
    assert (policy.sinks, policy.recency) == (sinks, recency)


# ---------------------------------------------------------------------------- fit

# The warning comes once per (policy, index_topk) and process, so a test of it needs
# an index_topk that nobody has used, on Hypothesis's replays as well.
unused_topk = itertools.count(1_000_003)


def fit_warnings(call):
    with heard() as lines:
        result = call()
    return result, lines


@pytest.mark.parametrize(
    ("sinks", "k", "recency"),
    [(4, 2048, 128), (4, 256, 128), (4, 255, 127), (4, 128, 64), (4, 5, 1), (0, 1, 0)],
)
def test_recency_that_nobody_asked_for_is_128_or_half(sinks, k, recency):
    fitted, caught = fit_warnings(lambda: SinkPolicy(sinks).fit(k))
    assert (fitted, caught) == (SinkPolicy(sinks, recency), [])
    assert str(fitted) == f"{sinks} sinks + {recency} recent"
    assert str(SinkPolicy(sinks)) == f"{sinks} sinks + up to 128 recent"


def test_fit_leaves_what_fits():
    policy = SinkPolicy(4, 60)
    fitted, caught = fit_warnings(lambda: policy.fit(64))
    assert fitted == policy
    assert caught == []


@pytest.mark.parametrize("sinks, k", [(17, 17), (19, 17), (1, 1), (0, 0)])
def test_fit_refuses_sinks_that_leave_no_slot(sinks, k):
    with pytest.raises(ValueError) as error:
        SinkPolicy(sinks, 0).fit(k)
    assert str(sinks) in str(error.value) and str(k) in str(error.value)


@given(st.integers(0, 100), st.integers(2, 100))
@examples(100)
def test_fit_clamps_recency_and_says_so_once(sinks, excess):
    k = next(unused_topk)
    policy = SinkPolicy(sinks, k - sinks + excess)
    fitted, caught = fit_warnings(lambda: policy.fit(k))
    assert fitted == SinkPolicy(sinks, k - sinks)
    assert len(caught) == 1

    equal = SinkPolicy(policy.sinks, policy.recency)
    for again in (policy, equal):
        fitted, caught = fit_warnings(partial(again.fit, k))
        assert fitted == SinkPolicy(sinks, k - sinks)
        assert caught == []

    assert len(fit_warnings(lambda: policy.fit(next(unused_topk)))[1]) == 1
    other = SinkPolicy(policy.sinks, policy.recency + 1)
    assert len(fit_warnings(lambda: other.fit(k))[1]) == 1


@given(st.integers(0, 80), st.integers(0, 80), st.integers(1, 80))
@examples(200)
def test_fit_in_general(sinks, recency, k):
    policy = SinkPolicy(sinks, recency)
    if sinks >= k:
        with pytest.raises(ValueError):
            policy.fit(k)
        return
    (fitted, again), _ = fit_warnings(lambda: (policy.fit(k), policy.fit(k)))
    assert fitted == again == SinkPolicy(sinks, min(recency, k - sinks))
    assert policy == SinkPolicy(sinks, recency)


# -------------------------------------------------------------- the environment


def read(value):
    return SinkPolicy.from_env({"MLX_SINKS": value})


@pytest.mark.parametrize("value", ["1", "on", "ON", "true", "yes", " 1 "])
def test_on(value):
    assert read(value) == SinkPolicy(sinks=4, recency=None)


@pytest.mark.parametrize("value", ["", "0", "off", "False", "no", " "])
def test_off(value):
    assert read(value) is None


def test_unset():
    assert SinkPolicy.from_env({}) is None


@pytest.mark.parametrize(
    ("value", "policy"),
    [
        ("sinks=8,recency=128", SinkPolicy(8, 128)),
        ("recency=128, sinks=8", SinkPolicy(8, 128)),
        ("sinks = 8", SinkPolicy(8)),
        ("RECENCY=0", SinkPolicy(4, 0)),
        ("sinks=0,recency=0", SinkPolicy(0, 0)),
    ],
)
def test_counts(value, policy):
    assert read(value) == policy


@pytest.mark.parametrize("scoring", ["blocks", "upstream"])
def test_scoring(scoring):
    assert read(f"scoring={scoring}") == SinkPolicy(scoring=scoring)


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("65536", 65536),
        ("1", 1),
        ("1 KB", 1000),
        ("512MB", 512 * 10**6),
        ("64MiB", 64 * 2**20),
        ("1GiB", 2**30),
        ("1gib", 2**30),
        ("1.5GB", 1_500_000_000),
        ("2TB", 2 * 10**12),
    ],
)
def test_sizes(value, size):
    assert read(f"sinks=8, score_memory={value}") == SinkPolicy(8, score_memory=size)


def test_by_default_scores_come_in_blocks_and_their_memory_is_the_devices():
    assert SinkPolicy() == read("1") == SinkPolicy(scoring="blocks", score_memory=None)


MISREAD_COUNTS = ["", "x", "-1", "1.5", "1e3", "1000000000", "9" * 5000, "٤"]
MISREAD_SIZES = ["", "0", "0GB", "0.5", "-1MB", "MB", "1XB", "1e9", "1.2.3MB", ".MB"]
MISREAD_SIZES += ["٤MB", "9" * 5000, "9999999999TB"]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("sink=8", "sinks"),
        ("kv-budget=64", "kv_budget"),
        ("recencies=9", "recency"),
        ("score-memory=1GB", "score_memory"),
        ("rotation=0", "rotating"),
        ("indexer_share=0", "index_share"),
    ],
)
def test_a_name_that_is_nearly_right_is_answered_with_the_right_one(given, meant):
    with pytest.raises(PolicyError, match=f"did you mean {meant}\\?"):
        SinkPolicy.from_env({"MLX_SINKS": given})


def test_a_name_that_is_nothing_is_answered_with_those_known():
    with pytest.raises(PolicyError, match="'xyzzy' is not a setting .known: sinks, "):
        SinkPolicy.from_env({"MLX_SINKS": "xyzzy=1"})


@pytest.mark.parametrize(
    "value",
    [
        *("8", "2", "foo=3", "=4", ",", "sinks", "scoring", "score_memory"),
        *("sinks=4;recency=8", "sinks=4,sinks=5", "sinks=4,", "sinks=4 recency=8"),
        *(f"sinks={count}" for count in MISREAD_COUNTS),
        *(f"scoring={word}" for word in ("", "fast", "1")),
        *(f"score_memory={size}" for size in MISREAD_SIZES),
        "score_memory=1MB,score_memory=2MB",
    ],
)
def test_anything_else_is_quoted_with_the_accepted_form(value):
    with pytest.raises(PolicyError) as caught:
        read(value)
    message = str(caught.value)
    assert message.startswith(f'MLX_SINKS="{value}": ')
    assert 'accepted: MLX_SINKS=1, MLX_SINKS=0 or MLX_SINKS="sinks=8,' in message
    assert "\n" not in message


def test_a_policy_error_is_a_value_error():
    assert issubclass(PolicyError, ValueError)


def test_numpy_integers_become_plain_ones():
    policy = SinkPolicy(np.int64(3), np.uint8(5), score_memory=np.int64(2**20))
    assert policy == SinkPolicy(3, 5, score_memory=2**20)
    assert type(policy.sinks) is type(policy.score_memory) is int


POLICIES = st.builds(
    SinkPolicy,
    sinks=st.integers(0, 999_999_999),
    recency=st.integers(0, 999_999_999),
    scoring=st.sampled_from(["blocks", "upstream"]),
    score_memory=st.none() | st.integers(1, 2**20) | st.integers(1, 2**42),
    sparse_from=st.none() | st.integers(1, 999_999_999),
)
WITH_BUDGETS = st.builds(
    SinkPolicy,
    sinks=st.integers(0, 99_999),
    kv_budget=st.integers(200_002, 999_999_999),  # room for all of them
)
SOME_OFF = st.sets(st.sampled_from(list(TARGETS))).map(
    lambda names: tuple(name for name in TARGETS if name in names)
)


@given(
    st.just(Settings())
    | st.builds(Settings, st.just(SinkPolicy()) | POLICIES | WITH_BUDGETS, SOME_OFF)
)
@examples(200)
def test_the_value_of_settings_is_read_as_those_settings(settings):
    assert Settings.from_env({"MLX_SINKS": settings.value()}) == settings


@pytest.mark.parametrize(
    ("said", "value", "off"),
    [
        (None, "0", None),
        ("off", "0", None),
        (" On ", "1", []),
        ("sinks=4", "1", []),
        ("rotating=1", "1", []),
        ("recency=8", "recency=8", []),
        ("snapkv=0,dsa=off", "dsa=0,snapkv=0", ["dsa", "snapkv"]),
        ("kv_budget=9", "kv_budget=9", []),
    ],
)
def test_settings(said, value, off):
    settings = Settings.from_env({} if said is None else {"MLX_SINKS": said})
    assert settings.value() == value
    on = [] if off is None else [name for name in TARGETS if name not in off]
    assert settings.targets == tuple(on)


def test_a_target_can_be_switched_on_again():
    assert Settings().switched_on("dsa") == Settings(SinkPolicy())
    some = Settings(SinkPolicy(8), ("dsa", "rotating"))
    assert some.switched_on("dsa") == Settings(SinkPolicy(8), ("rotating",))
    assert some.switched_on("snapkv") == some


def test_a_target_of_the_list_can_be_named_whoever_added_it(monkeypatch):
    monkeypatch.setitem(TARGETS, "elsewhere", TARGETS["dsa"])
    settings = Settings.from_env({"MLX_SINKS": "elsewhere=0"})
    assert settings == Settings(SinkPolicy(), ("elsewhere",))
    assert "elsewhere" not in settings.targets


@pytest.mark.parametrize("unit", ["", "B", "KB", "KiB", "MB", "GiB", "TB", "TiB"])
def test_a_size_that_was_read_can_be_read_again(unit):
    policy = read(f"score_memory=3{unit}")
    assert read(Settings(policy).value()) == policy


@pytest.mark.parametrize("recency", [8, 10**6])
def test_what_fits_is_scored_the_same_way(recency):
    policy = SinkPolicy(4, recency, scoring="upstream", score_memory=12345)
    fitted = policy.fit(16)
    assert (fitted.sinks, fitted.recency) == (4, min(recency, 12))
    assert (fitted.scoring, fitted.score_memory) == ("upstream", 12345)
