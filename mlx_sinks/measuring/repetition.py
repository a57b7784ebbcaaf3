"""How much a generated text repeats itself, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Repetition:
    """One block of a text.

    Parameters
    ----------
    start, tokens : int
        The block's first token and its length.
    repeated : dict of int to float
        For each n, the share of the block's tokens that lie in a repeated n-gram: n
        tokens in a row that also stand, in the same order, anywhere earlier in the
        text (an overlap counts as earlier).
    distinct : float
        Number of distinct tokens of the block, divided by its length.
    longest_run : int
        Length of the longest stretch that ends in the block and also stands earlier.
    """

    start: int
    tokens: int
    repeated: dict[int, float]
    distinct: float
    longest_run: int


def repetition(
    ids: Sequence[int], block: int = 250, grams: Sequence[int] = (4, 8)
) -> list[Repetition]:
    """Profile of a text by blocks of ``block`` tokens.

    A last block of under half the length joins the one before it; an empty text has
    no block.

    Raises
    ------
    ValueError
        ``block`` or an n below 1.
    """
    if min([block, *grams]) < 1:
        raise ValueError(f"block={block} and grams={grams} must be at least 1")
    tokens = np.asarray(ids)
    runs = _runs(tokens)
    repeated = {n: _inside(runs >= n, n) for n in grams}
    count = max(1, (len(tokens) + block // 2) // block)
    starts = [*range(0, count * block, block)] if len(tokens) else []
    return [
        Repetition(
            start=start,
            tokens=stop - start,
            repeated={
                n: float(inside[start:stop].mean()) for n, inside in repeated.items()
            },
            distinct=len(np.unique(tokens[start:stop])) / (stop - start),
            longest_run=int(runs[start:stop].max()),
        )
        for start, stop in zip(starts, [*starts[1:], len(tokens)])
    ]


def _runs(tokens: np.ndarray) -> np.ndarray:
    """For each token, how long a stretch that ends there also ends earlier."""
    longest = np.zeros(len(tokens), int)
    lengths = np.zeros(len(tokens), int)  # of the match that ends at each earlier token
    for i in range(1, len(tokens)):
        lengths[1:i] = lengths[: i - 1]
        lengths[0] = 0
        lengths[:i] = np.where(tokens[:i] == tokens[i], lengths[:i] + 1, 0)
        longest[i] = lengths[:i].max()
    return longest


def _inside(ends: np.ndarray, n: int) -> np.ndarray:
    """Which tokens lie in one of the n-grams that end where ``ends`` is true."""
    inside = np.zeros(len(ends), bool)
    for end in np.flatnonzero(ends):
        inside[end - n + 1 : end + 1] = True
    return inside
