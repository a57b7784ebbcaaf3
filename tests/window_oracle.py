"""Sinks and a window in plain NumPy, written from the contract alone.

Arrays are (heads, tokens, width); the token at index j stands at position j. All sums
are in float64.
"""

import mlx.nn as nn
import numpy as np


def visible(length, window, sinks):
    """(length, length): row p sees the sinks and the newest up to itself."""
    p, j = np.arange(length)[:, None], np.arange(length)[None]
    return (j <= p) & ((j < sinks) | (j > p - (window - sinks)))


def shown(mask, rows, columns):
    """A mask of mlx-lm as a bool array that ends in (rows, columns)."""
    if mask is None:
        return np.ones((rows, columns), bool)
    if isinstance(mask, str):
        assert mask == "causal"
        return np.tri(rows, columns, columns - rows, dtype=bool)
    mask = np.array(mask)
    assert mask.dtype == bool and mask.shape[-2:] == (rows, columns), mask.shape
    return mask


def attend(q, k, v, seen):
    """Softmax attention; NaN where a row sees nothing."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    repeats = q.shape[-3] // k.shape[-3]
    k, v = np.repeat(k, repeats, axis=-3), np.repeat(v, repeats, axis=-3)
    scores = q @ np.swapaxes(k, -1, -2) / q.shape[-1] ** 0.5
    scores = np.where(seen, scores, -np.inf)
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ v


def rotate(x, positions, rope):
    """What upstream's ``rope`` means, at any positions."""
    if isinstance(rope, nn.RoPE):
        dims, traditional, magnitude = rope.dims, rope.traditional, 1.0
        speeds = rope.scale * float(rope.base) ** -(np.arange(0, dims, 2) / dims)
    else:
        dims = rope.dims if hasattr(rope, "dims") else rope.dim
        traditional = getattr(rope, "traditional", False)
        magnitude = getattr(rope, "mscale", getattr(rope, "_scale", 1.0))
        speeds = 1 / np.array(rope._freqs).astype(np.float64)
    x = np.array(x, np.float64)
    angles = np.asarray(positions, np.float64)[:, None] * speeds
    cos, sin = magnitude * np.cos(angles), magnitude * np.sin(angles)
    if traditional:
        first, second = np.s_[..., 0:dims:2], np.s_[..., 1:dims:2]
    else:
        first, second = np.s_[..., : dims // 2], np.s_[..., dims // 2 : dims]
    a, b = x[first].copy(), x[second].copy()
    x[first], x[second] = a * cos - b * sin, a * sin + b * cos
    return x


def attention(q, k, v, start, stop, window, sinks, rope=None):
    """What the queries of one step, tokens ``start`` to ``stop``, see.

    With a ``rope`` in "local" mode: recent keys at their positions, and the sinks
    moved on by as many tokens as are evicted after the step.
    """
    q, k, v = q[:, start:stop], k[:, :stop], v[:, :stop]
    if rope is not None:
        positions = np.arange(stop)
        q = rotate(q, positions[start:], rope)
        positions[:sinks] += max(0, stop - window)
        k = rotate(k, positions, rope)
    return attend(q, k, v, visible(stop, window, sinks)[start:])


def naive_step(kept_q, kept_k, kept_v, rope):
    """One token's "local" step: the kept, unrotated tokens stand at 0, 1, 2, ..."""
    m = kept_k.shape[1]
    q = rotate(kept_q, [m - 1], rope)
    return attend(q, rotate(kept_k, range(m), rope), kept_v, np.ones((1, m), bool))


class NaiveWindow:
    """A cache of unrotated keys for single-token steps: what StreamingLLM keeps."""

    def __init__(self, window, sinks):
        self.window, self.sinks = window, sinks
        self.offset, self.keys, self.values = 0, None, None

    def update_and_fetch(self, keys, values):
        both = []
        for held, new in ((self.keys, keys), (self.values, values)):
            new = np.array(new)
            held = new if held is None else np.concatenate([held, new], axis=2)
            if held.shape[2] > self.window:
                held = np.delete(held, self.sinks, axis=2)
            both.append(held)
        self.keys, self.values = both
        return self.keys, self.values

    def make_mask(self, *_, **__):
        return None
