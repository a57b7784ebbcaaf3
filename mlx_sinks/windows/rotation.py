"""Moving a key by a number of positions, as its layer's own rope would rotate it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import rope_utils

# Classes whose angle is linear in the position, so that rotations add up. Their own
# magnitude (YaRN's, LongRoPE's) is in the key already; a move doesn't change it.
_FREQS = (
    rope_utils.Llama3RoPE,
    rope_utils.ProportionalRoPE,
    rope_utils.SuScaledRoPE,
    rope_utils.YarnRoPE,
)


@dataclass(frozen=True)
class Rotation:
    """A rotary embedding without magnitude: angle ``position / freqs``.

    A moved key is ``key * cos + quarter * sin``. The quarter is the key rotated by a
    right angle. Angles are float64, on the host; the sum is float32.

    Parameters
    ----------
    freqs : tuple of float, length dims / 2
        As ``mx.fast.rope`` has them: the inverse of the angle that one position adds.
    traditional : bool, default=False
        Whether neighbouring dims are a pair, rather than dims of the two halves.
    """

    freqs: tuple[float, ...]
    traditional: bool = False

    @classmethod
    def of(cls, rope: nn.Module) -> Rotation:
        """The rotation of a rope module of mlx or mlx-lm.

        Raises
        ------
        ValueError
            The module's rotations don't add up. The message names its class.
        """
        if type(rope) is nn.RoPE:
            exponents = np.arange(0, rope.dims, 2) / rope.dims
            # In float32, which is what a saved cache holds.
            freqs = np.float32(float(rope.base) ** exponents / rope.scale)
            return cls(tuple(freqs.tolist()), rope.traditional)
        if type(rope) in _FREQS:
            freqs = rope._freqs.astype(mx.float32).tolist()
            return cls(tuple(freqs), getattr(rope, "traditional", False))
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
            Of the shape and dtype of ``keys``.
        """
        return self.turned(self.parts(keys), positions).astype(keys.dtype)

    def parts(self, keys: mx.array) -> mx.array:
        """The keys and their quarters in float32, (B, H, T, 2, D)."""
        dims, D = 2 * len(self.freqs), keys.shape[-1]
        partner = np.arange(D)
        sign = np.zeros(D, np.float32)
        if self.traditional:
            partner[:dims] = partner[:dims].reshape(-1, 2)[:, ::-1].ravel()
            sign[:dims] = np.tile([-1, 1], dims // 2)
        else:
            partner[:dims] = np.roll(partner[:dims], dims // 2)
            sign[:dims] = np.repeat([-1, 1], dims // 2)
        keys = keys.astype(mx.float32)
        quarters = mx.take(keys, mx.array(partner), axis=-1) * mx.array(sign)
        return mx.stack([keys, quarters], axis=-2)

    def turned(self, parts: mx.array, positions: list[int]) -> mx.array:
        """The keys of ``parts`` after the move, (B, H, T, D) in float32."""
        factors = _factors(self, tuple(positions), parts.shape[-1])
        return (parts * factors).sum(axis=-2)


@functools.lru_cache(maxsize=64)  # all layers of a step ask for the same
def _factors(rotation: Rotation, positions: tuple[int, ...], D: int) -> mx.array:
    """Cosines and sines of each dim, (B, 1, 1, 2, D); 1 and 0 where none is rotated."""
    dims = 2 * len(rotation.freqs)
    repeated = np.repeat if rotation.traditional else np.tile
    angles = np.zeros((len(positions), 1, 1, D))
    speeds = repeated(1 / np.array(rotation.freqs), 2)
    angles[..., :dims] = np.array(positions).reshape(-1, 1, 1, 1) * speeds
    factors = np.stack([np.cos(angles), np.sin(angles)], axis=-2)
    return mx.array(factors.astype(np.float32))
