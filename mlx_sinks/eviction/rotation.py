"""Moving a key by a number of positions, as its layer's own rope would have put it."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import rope_utils

# Kinds whose angle is linear in the position: two of them add up to one. Their own
# magnitude (YaRN's, LongRoPE's) is on the key already and no part of a move.
_FREQS = (
    rope_utils.Llama3RoPE,
    rope_utils.ProportionalRoPE,
    rope_utils.SuScaledRoPE,
    rope_utils.YarnRoPE,
)


@dataclass(frozen=True)
class Rotation:
    """A rotary embedding without magnitude: angle ``position / freqs``, in float32.

    Parameters
    ----------
    freqs : mx.array, shape (dims / 2,)
        As ``mx.fast.rope`` has them: the inverse of what a position adds.
    traditional : bool, default=False
        Neighbouring dims are rotated together, rather than the two halves'.
    """

    freqs: mx.array
    traditional: bool = False

    @classmethod
    def of(cls, rope: nn.Module) -> Rotation:
        """That of a rope module of mlx or mlx-lm.

        Raises
        ------
        ValueError
            A kind that doesn't add up, named.
        """
        if type(rope) is nn.RoPE:
            exponents = mx.arange(0, rope.dims, 2, dtype=mx.float32) / rope.dims
            return cls(rope.base**exponents / rope.scale, rope.traditional)
        if type(rope) in _FREQS:
            return cls(rope._freqs, getattr(rope, "traditional", False))
        raise ValueError(
            f"position_mode='local' can't move keys that {type(rope).__name__} has "
            "rotated: its angles don't add up, or aren't known to; use 'absolute'"
        )

    def turn(self, keys: mx.array, positions: list[int]) -> mx.array:
        """Each sequence's keys moved by its number of positions.

        Parameters
        ----------
        keys : mx.array, shape (B, H, T, D)
        positions : list of int, length B or 1
            Forwards where positive.

        Returns
        -------
        mx.array
            As ``keys``, in their dtype.
        """
        if not any(positions):
            return keys
        B, H, T, D = keys.shape
        moved = mx.fast.rope(
            keys.astype(mx.float32).reshape(B, H * T, 1, D),
            2 * self.freqs.size,
            traditional=self.traditional,
            base=None,
            scale=1.0,
            offset=mx.array(positions) if len(positions) > 1 else positions[0],
            freqs=self.freqs,
        )
        return moved.reshape(keys.shape).astype(keys.dtype)
