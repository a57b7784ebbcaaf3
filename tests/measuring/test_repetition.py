"""A text's repetition, held against a search of every n-gram among all earlier ones."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_sinks.measuring.repetition import repetition
from strategies import examples

# ---------------------------------------------------------------- the oracle


def stands_earlier(text, start, n):
    return any(text[j : j + n] == text[start : start + n] for j in range(start))


def in_a_repeated_gram(text, n):
    """For each token, whether one of the n-grams that it lies in stands earlier."""
    inside = [False] * len(text)
    for start in range(len(text) - n + 1):
        if stands_earlier(text, start, n):
            for i in range(start, start + n):
                inside[i] = True
    return inside


def longest_ending_at(text, end):
    lengths = [n for n in range(1, end + 1) if stands_earlier(text, end - n + 1, n)]
    return max(lengths, default=0)


def expected_blocks(text, block):
    """(start, stop) of each block."""
    bounds = []
    for start in range(0, len(text), block):
        stop = min(start + block, len(text))
        if bounds and 2 * (stop - start) < block:
            bounds[-1] = (bounds[-1][0], stop)
        else:
            bounds.append((start, stop))
    return bounds


# ---------------------------------------------------------------- properties


@examples(150)
@given(
    text=st.lists(st.integers(0, 3), max_size=50),
    block=st.integers(1, 20),
    grams=st.lists(st.integers(1, 6), unique=True, max_size=3),
)
def test_against_the_oracle(text, block, grams):
    profile = repetition(text, block, grams)
    bounds = expected_blocks(text, block)
    assert [(one.start, one.start + one.tokens) for one in profile] == bounds
    inside = {n: in_a_repeated_gram(text, n) for n in grams}
    for one, (start, stop) in zip(profile, bounds):
        assert one.repeated == pytest.approx(
            {n: sum(inside[n][start:stop]) / (stop - start) for n in grams}
        )
        assert one.distinct == pytest.approx(
            len(set(text[start:stop])) / (stop - start)
        )
        assert one.longest_run == max(
            longest_ending_at(text, end) for end in range(start, stop)
        )


@examples(150)
@given(
    text=st.lists(st.integers(0, 2), max_size=40),
    names=st.permutations([0, 7, 2**31 - 1]),
)
def test_only_which_tokens_are_equal_counts(text, names):
    renamed = [names[token] for token in text]
    assert repetition(renamed, 10, (2, 3)) == repetition(text, 10, (2, 3))


# ---------------------------------------------------------------- examples


def test_an_empty_text_has_no_block():
    assert repetition([]) == []


def test_a_text_without_repetition():
    first, second = repetition(range(500))
    assert (first.start, first.tokens, second.start, second.tokens) == (
        0,
        250,
        250,
        250,
    )
    for one in (first, second):
        assert one.repeated == {4: 0.0, 8: 0.0}
        assert one.distinct == 1.0
        assert one.longest_run == 0


def test_a_loop_repeats_itself_from_its_second_turn_on():
    """Overlaps count: the fourth turn of three tokens repeats a run of nine."""
    turn = [5, 6, 7]
    (one,) = repetition(turn * 4, block=12)
    assert one.repeated == {4: 9 / 12, 8: 9 / 12}
    assert one.distinct == 3 / 12
    assert one.longest_run == 9


def test_an_earlier_block_counts_and_so_does_a_gram_that_crosses_into_the_next():
    text = [1, 2, 3, 4, 10, 11, 12, 1, 2, 3, 4, 13]
    first, second = repetition(text, block=8, grams=(4,))
    assert first.repeated == {4: 1 / 8}
    assert second.repeated == {4: 3 / 4}
    assert (first.longest_run, second.longest_run) == (1, 4)


@pytest.mark.parametrize(
    ("length", "block", "tokens"),
    [
        (5, 250, [5]),  # nothing before it to join
        (300, 250, [300]),
        (374, 250, [374]),
        (375, 250, [250, 125]),
        (500, 250, [250, 250]),
        (501, 250, [250, 251]),
        (10, 7, [10]),
        (11, 7, [7, 4]),
    ],
)
def test_a_short_last_block_joins_the_one_before(length, block, tokens):
    assert [one.tokens for one in repetition([0] * length, block)] == tokens


def test_a_text_shorter_than_the_grams():
    (one,) = repetition([1, 1, 1], grams=(4,))
    assert one.repeated == {4: 0.0}
    assert one.longest_run == 2


def test_other_sequences_of_tokens():
    text = [3, 1, 3, 1, 3]
    assert repetition(np.array(text), 5) == repetition(tuple(text), 5)
