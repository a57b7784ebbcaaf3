"""The forced columns, held against an oracle: examples, then properties."""

from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given

import oracle
from mlx_sinks import SinkPolicy
from mlx_sinks.sparse.columns import columns_to_force, forced_columns
from strategies import cases, examples


def forced(policy, L, T, left_padding=None, mask=None):
    """The forced columns of each (sequence, query), as lists."""
    arrays = (None if a is None else mx.array(a) for a in (left_padding, mask))
    found = forced_columns(policy, L, T, *arrays)
    assert found.dtype == mx.bool_
    return [[np.flatnonzero(row).tolist() for row in seq[0]] for seq in np.array(found)]


def test_forced_when_decoding():
    assert forced(SinkPolicy(2, 3), 1, 10) == [[[0, 1, 7, 8, 9]]]


def test_forced_when_prefilling():
    assert forced(SinkPolicy(2, 2), 3, 8) == [
        [[0, 1, 4, 5], [0, 1, 5, 6], [0, 1, 6, 7]]
    ]


def test_forced_never_looks_ahead():
    assert forced(SinkPolicy(3, 2), 4, 4) == [[[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]]


def test_forced_starts_at_the_first_real_column():
    assert forced(SinkPolicy(2, 3), 1, 8, [0, 3, 6, 7, 8]) == [
        [[0, 1, 5, 6, 7]],
        [[3, 4, 5, 6, 7]],
        [[6, 7]],
        [[7]],
        [[]],
    ]


def test_forced_is_empty_for_a_query_in_the_padding():
    assert forced(SinkPolicy(2, 2), 4, 6, [4]) == [[[], [], [4], [4, 5]]]


def test_forced_leaves_out_what_the_mask_hides():
    mask = np.array([[0, 1, 1, 1, 1, 1, 0, 1]], dtype=bool)
    assert forced(SinkPolicy(2, 3), 1, 8, mask=mask) == [[[1, 5, 7]]]


def test_forced_of_no_policy_is_empty():
    assert forced(SinkPolicy(0, 0), 2, 5) == [[[], []]]


@pytest.mark.parametrize("dtype", [mx.int32, mx.int64, mx.uint32, mx.int16])
def test_forced_takes_every_integer_padding(dtype):
    padding = mx.array([0, 3, 6], dtype=dtype)
    found = np.array(forced_columns(SinkPolicy(2, 4), 2, 6, padding))
    assert (found == oracle.forced_columns(2, 4, 3, 2, 6, [0, 3, 6])).all()


@pytest.mark.parametrize("huge", [10**6, 2**31 - 1, 2**40])
def test_forced_of_a_huge_policy_is_everything_up_to_the_query(huge):
    everything = [[[2, 3], [2, 3, 4]]]
    assert forced(SinkPolicy(huge, 0), 2, 5, [2]) == everything
    assert forced(SinkPolicy(0, huge), 2, 5, [2]) == everything


@given(cases(sparse=False))
@examples(300)
def test_forced_equals_the_oracle(case):
    _, _, policy, left_padding, mask = case.arguments()
    found = forced_columns(policy, case.L, case.T, left_padding, mask)
    assert found.dtype == mx.bool_
    assert found.shape in {(1, 1, case.L, case.T), (case.B, 1, case.L, case.T)}
    expected = oracle.forced_columns(
        case.sinks, case.recency, case.B, case.L, case.T, case.left, case.mask
    )
    assert np.array_equal(np.broadcast_to(np.array(found), expected.shape), expected)


@given(cases(sparse=False))
@examples(20)
def test_traced_forced_columns_equal_untraced(case):
    _, _, policy, _, mask = case.arguments()
    arrays = mx.array(case.left or (0,) * case.B), mask
    if mask is None:
        arrays = arrays[0], mx.array(case.shown)
    call = partial(forced_columns, policy, case.L, case.T)
    assert mx.array_equal(mx.compile(call)(*arrays), call(*arrays))


def test_places_beyond_the_buffer_are_none():
    """No cache makes them; gathered and scattered they would be anybody's memory."""
    columns, _ = columns_to_force(SinkPolicy(3, 2), 1, 20, mx.array([-3]))
    assert np.array(columns).min() >= 0
    columns, _ = columns_to_force(SinkPolicy(3, 2), 9, 4)
    assert np.array(columns).min() >= 0
