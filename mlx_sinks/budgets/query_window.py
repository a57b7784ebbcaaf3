"""The observation window: the newest queries of a prompt, which score its rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx


@dataclass(frozen=True)
class QueryWindow:
    """The newest queries of one sequence.

    Attributes
    ----------
    queries : mx.array, shape (1, H, up to W, D), optional
        ``None`` where none is kept.
    end : int
        Number of tokens up to that of the last query. Later tokens make the window
        useless until they are trimmed.
    """

    queries: mx.array | None = None
    end: int = 0

    @property
    def nbytes(self) -> int:
        return 0 if self.queries is None else self.queries.nbytes

    def reaches(self, seen: int) -> bool:
        """Whether the newest of ``seen`` tokens has its query here."""
        return self.queries is not None and self.end == seen

    def after(self, new: mx.array, seen: int, W: int) -> QueryWindow:
        """The window after a step.

        Parameters
        ----------
        new : mx.array, shape (1, H, L, D)
            Queries of the step.
        seen : int
            Tokens seen after it; negative while left padding is read.
        W : int
            Number of queries to keep.
        """
        # Queries of left padding are not kept.
        new = new[..., max(0, new.shape[2] - max(0, seen)) :, :]
        if self.reaches(seen - new.shape[2]):
            new = mx.concatenate([self.queries, new], axis=2)
        # A copy: a slice would keep all of the step's queries in memory.
        return QueryWindow(
            mx.contiguous(new[..., -W:, :]) if new.shape[2] else None, seen
        )

    def trimmed(self, seen: int) -> QueryWindow:
        """The window after a trim to the first ``seen`` tokens."""
        if self.queries is None or seen >= self.end:
            return self
        left = self.queries[..., : seen - self.end, :]
        return QueryWindow(left if left.shape[2] else None, seen)


@dataclass(frozen=True)
class Observation:
    """What a cache notes of a step until it is shown the step's queries.

    Attributes
    ----------
    W : int
        Number of queries to keep of each sequence.
    fetched : tuple of mx.array, shape (B, H, T, D), optional
        What the last update returned, for the layer's attention.
    steps : list of int, length B
        Tokens of that update that belong to each sequence.
    """

    W: int
    fetched: tuple[mx.array, mx.array] | None = None
    steps: list[int] = field(default_factory=list)

    def of_each(self, queries: mx.array) -> list[mx.array]:
        """Each sequence's part of a step's queries, (1, H, L, D)."""
        return [queries[b : b + 1, :, :L] for b, L in enumerate(self.steps)]
