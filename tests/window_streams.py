"""Unrotated streams of queries, keys and values, fed to caches with a window.

Whatever a cache gives is held against ``window_oracle``.
"""

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

import window_oracle
from batch_histories import BatchHistory

HEADS, WIDTH = 2, 16
NOISE = dict(rtol=1e-4, atol=1e-4)


def stream(seed, length):
    """Unrotated queries, keys and values of a sequence."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((3, HEADS, length, WIDTH)).astype(np.float32)


def attend(cache, q, k, v, rope=None):
    """One step as mlx-lm's models take it; the sums in float64."""
    mask = cache.make_mask(q.shape[2])
    q, k, v = (mx.array(x) for x in (q, k, v))
    if rope is not None:
        q, k = rope(q, offset=cache.offset), rope(k, offset=cache.offset)
    keys, values = cache.update_and_fetch(k, v)
    seen = window_oracle.shown(mask, q.shape[2], keys.shape[2])
    out = window_oracle.attend(np.array(q), np.array(keys), np.array(values), seen)
    mx.eval(cache.state)
    return out


def feed(cache, whole, start, stop, rope=None):
    """Tokens ``start`` to ``stop`` of a stream, in one step."""
    return attend(cache, *whole[:, None, :, start:stop], rope)[0]


def check(cache, whole, cuts, window, sinks, rope=None, start=0):
    """Feed a stream in pieces, each held against the oracle; returns the end."""
    for cut in cuts:
        ours = feed(cache, whole, start, start + cut, rope)
        expected = window_oracle.attention(
            *whole, start, start + cut, window, sinks, rope
        )
        np.testing.assert_allclose(ours, expected, **NOISE)
        start += cut
    return start


def check_rows(batch, rows, lengths, window, sinks, chunk=None, rope=None, left=False):
    """Feed each row's next tokens; each is held against its own oracle.

    A row is [stream, tokens seen]. Padding is full of nines.
    """
    width = max(lengths)
    padding = [width - length for length in lengths]
    inputs = np.full((3, len(rows), HEADS, width, WIDTH), 9.0, np.float32)
    places = []
    for i, ((whole, seen), length) in enumerate(zip(rows, lengths)):
        place = slice(width - length, width) if left else slice(0, length)
        inputs[:, i, :, place] = whole[:, :, seen : seen + length]
        places.append(place)
    if any(padding):
        if left:
            batch.prepare(left_padding=padding)
        else:
            batch.prepare(lengths=lengths, right_padding=padding)
    out = []
    for start in range(0, width, chunk or width):
        part = inputs[..., start : start + (chunk or width), :]
        out.append(attend(batch, *part, rope))
    if any(padding) and not left:
        batch.finalize()
    out = np.concatenate(out, axis=2)
    for i, (row, length, place) in enumerate(zip(rows, lengths, places)):
        for first in range(0, width, chunk or width):
            columns = range(first, min(first + (chunk or width), width))
            real = [c for c in columns if place.start <= c < place.stop]
            # Where a "local" step has padding, its last row isn't the sequence's.
            if not real or (rope is not None and len(real) < len(columns)):
                continue
            start = row[1] + real[0] - place.start
            stop = start + len(real)
            expected = window_oracle.attention(
                *row[0], start, stop, window, sinks, rope
            )
            np.testing.assert_allclose(out[i][:, real], expected, **NOISE)
        row[1] += length
    assert batch.offset.shape == (len(rows),)
    if rope is None:
        assert batch.offset.tolist() == [seen for _, seen in rows]


class WindowHistory(BatchHistory):
    """A batch of one layer; a row is [stream, tokens seen]."""

    rope, made = None, 0

    def make(self):
        """A new cache of ``window`` and ``sinks``."""
        raise NotImplementedError

    def check_facts(self, cache, seen):
        """Hold what a cache says of itself, after so many tokens."""

    def alone(self, draw):
        cuts = draw(st.lists(st.integers(1, 20), max_size=2), "cuts")
        whole = stream(self.made, 400)
        # Every second query weighs alike whatever it sees: no token is too faint.
        whole[0, :, ::2] = 0
        self.made += 1
        cache = self.make()
        return [cache], [whole, self.check(cache, whole, cuts)]

    def check(self, cache, whole, cuts, start=0):
        return check(cache, whole, cuts, self.window, self.sinks, self.rope, start)

    def feed(self, batch, rows, lengths, chunk):
        windows = self.window, self.sinks
        check_rows(*batch, rows, lengths, *windows, chunk, self.rope)

    def check_alone(self, caches, row, cuts):
        ([cache], (whole, seen)) = caches, row
        self.check_facts(cache, seen)
        row[1] = self.check(cache, whole, cuts, seen)
        self.check_facts(cache, row[1])

    def twin(self, row):
        return [*row]
