"""SinkPolicy from the environment: the accepted forms, and sentences for the rest."""

import numpy as np
import pytest

from mlx_sinks import PolicyError, SinkPolicy


def read(value):
    return SinkPolicy.from_env({"MLX_SINKS": value})


@pytest.mark.parametrize("value", ["1", "on", "ON", "true", "yes", " 1 "])
def test_on(value):
    assert read(value) == SinkPolicy(sinks=4, recency=64)


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
        ("sinks = 8", SinkPolicy(8, 64)),
        ("RECENCY=0", SinkPolicy(4, 0)),
        ("sinks=0,recency=0", SinkPolicy(0, 0)),
    ],
)
def test_counts(value, policy):
    assert read(value) == policy


@pytest.mark.parametrize(
    "value",
    [
        "8",
        "2",
        "sinks",
        "sinks=",
        "sinks=x",
        "sinks=-1",
        "sinks=1.5",
        "sinks=1e3",
        "sinks=1000000000",
        "sinks=" + "9" * 5000,
        "sinks=٤",
        "sinks=4;recency=8",
        "sinks=4,sinks=5",
        "sinks=4,",
        "foo=3",
        "=4",
        ",",
        "sinks=4 recency=8",
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
    policy = SinkPolicy(np.int64(3), np.uint8(5))
    assert policy == SinkPolicy(3, 5)
    assert type(policy.sinks) is int
