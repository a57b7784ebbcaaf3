"""Which tokens a window keeps, in which columns, and which queries see them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..policy import whole_number

# The position of a column that holds no token: later than any query.
EMPTY = np.iinfo(np.int32).max // 2


@dataclass(frozen=True)
class Window:
    """The sinks and the newest tokens of a sequence, in ``size`` columns.

    A token's column follows from its position alone. The first ``size`` tokens take a
    column each. Every later token takes that of the oldest token that is no sink.

    Parameters
    ----------
    size : int
        Number of tokens kept, sinks included.
    sinks : int
        First tokens of the sequence, kept for good.

    Raises
    ------
    ValueError
        A count that is no whole number, ``size < 1``, or ``sinks >= size``.
    """

    size: int
    sinks: int

    def __post_init__(self):
        object.__setattr__(self, "size", whole_number("window", self.size, least=1))
        object.__setattr__(self, "sinks", whole_number("sinks", self.sinks))
        if self.sinks >= self.size:
            raise ValueError(
                f"sinks={self.sinks} must be smaller than window={self.size}, which "
                "counts everything kept"
            )

    @functools.cached_property
    def recent(self) -> int:
        """Number of columns that aren't the sinks'."""
        return self.size - self.sinks

    def column(self, position: int) -> int:
        """The column of the token at a position."""
        if position < self.size:
            return position
        return self.sinks + (position - self.sinks) % self.recent

    def evicted(self, seen: int) -> int:
        """How many of ``seen`` tokens are evicted."""
        return max(0, seen - self.size)

    def held(self, seen: list[int], columns: int) -> np.ndarray:
        """Positions that the first ``columns`` columns hold after ``seen`` tokens each.

        ``EMPTY`` where a column holds no token; shape (B, columns).
        """
        column = np.arange(columns)
        newest = np.array(seen)[:, None] - 1
        position = np.where(
            column < self.sinks, column, newest - (newest - column) % self.recent
        )
        filled = (position <= newest) & (
            (column < self.sinks) | (position >= self.sinks)
        )
        return np.where(filled, position, EMPTY)

    def visible(
        self, keys: np.ndarray, queries: np.ndarray, window_size: int | None = None
    ) -> mx.array:
        """What each query sees: the sinks and the newest tokens up to itself.

        Parameters
        ----------
        keys, queries : np.ndarray, shape (B, T) and (B, L)
            Positions.
        window_size : int, optional
            The model's own sliding window: of older tokens only the sinks are visible.

        Returns
        -------
        mx.array of bool, shape (B, 1, L, T)
        """
        position = mx.array(keys.astype(np.int32))[:, None, None, :]
        age = mx.array(queries.astype(np.int32))[:, None, :, None] - position
        recent = self.recent if window_size is None else min(self.recent, window_size)
        return (age >= 0) & ((age < recent) | (position < self.sinks))

    def narrowed_by(self, window_size: int | None) -> bool:
        """Whether a model's own sliding window hides tokens that this one keeps."""
        return window_size is not None and window_size < self.recent
