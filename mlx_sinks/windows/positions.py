"""The positions that a window's tokens have for the layer's rope."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..upstream.caches import stacked
from .rotation import Rotation
from .window import Window

# The position at which a sequence in ``local`` is moved back. Up to here float32 holds
# angles to 1e-3, and a window is rotated rarely.
REBASE_AT = 16_384


class Positions:
    """The difference between a token's position and its number in the sequence.

    Without a rotation (``"absolute"``) there is no difference, and no key is moved.
    With one (``"local"``) each evicted token moves the sinks forwards by a position. A
    long sequence is moved back now and then (a rebase).

    Attributes
    ----------
    rotation : Rotation, optional
        The rotation of the layer's rope.
    moved : list of int, length B
        How far rebases have moved each sequence's positions.
    originals : mx.array of float32, shape (B, H, sinks, 2, D), optional
        ``Rotation.parts`` of the sinks' keys as the model rotated them. Set once a
        token was evicted.
    rotations : int
        Number of key rotations so far; all heads of a token count as one.
    """

    def __init__(self, window: Window, rotation: Rotation | None, moved: list[int]):
        self.window = window
        self.rotation = rotation
        self.moved = moved
        self.originals: mx.array | None = None
        self.rotations = 0

    def sinks_to_move(self, ends: list[int]) -> int:
        """How many sinks move in a step: none in ``absolute`` or before evictions."""
        return (
            self.window.sinks if self.rotation and max(ends) > self.window.size else 0
        )

    def move_sinks(self, held: mx.array, seen: list[int], ends: list[int]) -> mx.array:
        """The sinks' keys at their positions after a step.

        Parameters
        ----------
        held : mx.array, shape (B, H, sinks, D)
            Their keys before the step.
        seen, ends : list of int, length B
            Tokens of each sequence before the step and after it.
        """
        fresh = [each <= self.window.size for each in seen]
        if self.originals is None:
            self.originals = self.rotation.parts(held)
        elif any(fresh):
            which = mx.array(fresh).reshape(-1, 1, 1, 1, 1)
            parts = self.rotation.parts(held)
            self.originals = mx.where(which, parts, self.originals)
        evicted = [self.window.evicted(end) for end in ends]
        moves = [count - moved for count, moved in zip(evicted, self.moved)]
        self.rotations += self.window.sinks * sum(map(bool, moves))
        return self.rotation.turned(self.originals, moves).astype(held.dtype)

    def rebase(self, keys: mx.array, seen: list[int]) -> mx.array:
        """The keys held. Long sequences are moved back to StreamingLLM's positions.

        Parameters
        ----------
        keys : mx.array, shape (B, H, T, D)
        seen : list of int, length B
            Tokens of each sequence.
        """
        if self.rotation is None:
            return keys
        limit = max(REBASE_AT, 2 * self.window.size)
        moves = [
            self.window.evicted(n) - moved if n - moved >= limit else 0
            for n, moved in zip(seen, self.moved)
        ]
        if not any(moves):
            return keys
        self.rotations += self.window.size * sum(map(bool, moves))
        self.moved = [moved + move for moved, move in zip(self.moved, moves)]
        return self.rotation.turn(keys, [-move for move in moves])

    def filter(self, kept: list[int]) -> None:
        """Keep these sequences only, in this order."""
        self.moved = [self.moved[index] for index in kept]
        if self.originals is not None:
            self.originals = self.originals[mx.array(kept)]

    def extract(self, index: int, seen: int) -> Positions:
        """The positions of one sequence of ``seen`` tokens, with ``rotations`` at 0."""
        alone = Positions(self.window, self.rotation, [self.moved[index]])
        if self.window.evicted(seen) and self.originals is not None:
            alone.originals = self.originals[index : index + 1]
        return alone

    @classmethod
    def merge(cls, several: Sequence[Positions]) -> Positions:
        """The positions of the sequences of several, in order."""
        moved = [each.moved for each in several]
        first = several[0]
        merged = cls(first.window, first.rotation, sum(moved, []))
        merged.originals = stacked(
            [each.originals for each in several], [*map(len, moved)]
        )
        merged.rotations = sum(each.rotations for each in several)
        return merged
