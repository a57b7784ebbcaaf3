"""Arms side by side: in turn in one process, and compared round by round."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any, TypeVar

import mlx.core as mx

Arm = TypeVar("Arm")
T = TypeVar("T")
FEWEST, MOST = 3, 300  # rounds in a budget of seconds, but of what takes too long two


def turns(
    arms: Mapping[Arm, Callable[[], T]],
    step: Callable[[], object] = lambda: None,
    seed: int = 0,
) -> Iterator[dict[Arm, T]]:
    """Rounds without end: what each arm returns, each round in an order of its own."""
    order, dice = list(arms), random.Random(seed)
    while True:
        dice.shuffle(order)  # who goes before whom makes a difference
        results = {}
        for arm in order:
            results[arm] = arms[arm]()
            step()
        yield results


def in_turn(
    arms: Mapping[Arm, Callable[[], T]],
    rounds: int,
    step: Callable[[], object] = lambda: None,
) -> list[dict[Arm, T]]:
    """What each arm returns, round by round, after a round to warm up.

    ``step`` is called after each of the ``(1 + rounds) * len(arms)`` calls.
    """
    return list(islice(turns(arms, step), 1, 1 + rounds))


def in_seconds(
    calls: Mapping[Arm, Callable[[], mx.array]], budget: float
) -> list[dict[Arm, float]]:
    """Seconds of each call, round by round: of as many rounds as fit the budget."""
    every = turns({arm: partial(seconds, call) for arm, call in calls.items()})
    first = next(every)
    rounds = min(MOST, round(budget / sum(first.values())))
    kept = [] if rounds >= FEWEST else [first]  # there is no time to warm up
    return [*kept, *islice(every, max(rounds, 1))]


def seconds(call: Callable[[], Any], times: int = 1) -> float:
    """Of one call and the evaluation of what it returns, the mean of several."""
    start = perf_counter()
    for _ in range(times):
        mx.eval(call())
    return (perf_counter() - start) / times


def median(rounds: list[dict[Arm, float]], arm: Arm) -> float:
    return statistics.median(each[arm] for each in rounds)


def ratio(rounds: list[dict[Arm, float]], over: Arm, under: Arm) -> float:
    """The median of the rounds' ratios of one arm to another."""
    return statistics.median(each[over] / each[under] for each in rounds)
