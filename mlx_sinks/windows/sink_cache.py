"""A key-value cache that evicts the oldest tokens, and never a sink."""

from __future__ import annotations

import copy
import sys
from typing import Any

import mlx.core as mx
import numpy as np

from ..upstream.caches import OwnCache, apart, integers, register, stacked
from .positions import Positions
from .rotation import Rotation
from .window import EMPTY, Window


class SinkCache(OwnCache):
    """One layer's keys and values of the sinks and of the newest tokens.

    For one sequence; ``merge`` makes a ``BatchSinkCache`` of several. The query at
    position ``p`` sees the first ``sinks`` tokens and the ``window - sinks`` newest up
    to itself, however the tokens are cut into calls. Source: Xiao et al. 2023,
    "Efficient Streaming Language Models with Attention Sinks" (StreamingLLM).

    With a ``rotation`` (``position_mode="local"``) positions count kept tokens only:
    before each step's attention the sinks' original keys are moved forwards by the
    number of evicted tokens. All queries of a step see the sinks at the positions that
    are right for its last query. Without one (``"absolute"``) no key is ever moved.

    Parameters
    ----------
    window : int
        Number of tokens kept, sinks included.
    sinks : int, default=4
        First tokens of the sequence, kept for good.
    rotation : Rotation, optional
        The rotation of the layer's rope.

    Attributes
    ----------
    offset : int
        Position of the next token for the layer's rope; in ``absolute`` the number of
        tokens seen.
    evictions : int
        Number of tokens evicted so far.
    rotations : int
        Number of key rotations so far; all heads of a token count as one.
    """

    step = 256

    def __init__(self, window: int, sinks: int = 4, rotation: Rotation | None = None):
        self._start(Positions(Window(window, sinks), rotation, [0]), [0])

    def _start(self, positions: Positions, seen: list[int]):
        self.window = positions.window
        # The columns held: the window's, and a reserve while one is asked for.
        self._storage = positions.window
        # With a reserve, the first position after the sinks from which on all are held.
        self._held_from = 0
        self.keys = self.values = None
        # Tokens seen of each sequence; negative while its left padding is read.
        self._seen = seen
        self._positions = positions
        # Tokens seen when each right-padded prompt ends; None while none is read.
        self._ends = None

    @property
    def offset(self) -> int:
        return self._seen[0] - self._positions.moved[0]

    @property
    def rotation(self) -> Rotation | None:
        return self._positions.rotation

    @property
    def rotations(self) -> int:
        return self._positions.rotations

    @property
    def evictions(self) -> int:
        return sum(map(self.window.evicted, self._seen))

    def size(self) -> int:
        return min(max(self._seen), self.window.size)

    def empty(self) -> bool:
        return self.keys is None

    @property
    def nbytes(self) -> int:
        arrays = (self.keys, self.values, self._positions.originals)
        return sum(array.nbytes for array in arrays if array is not None)

    @classmethod
    def of(
        cls, window: int, sinks: int, seen: int, keys: mx.array, values: mx.array
    ) -> SinkCache:
        """A cache that continues from another's keys and values.

        Parameters
        ----------
        window, sinks, seen : int
            Numbers of tokens kept, kept for good, and seen so far.
        keys, values : mx.array, shape (1, H, T, D)
            In order of time: the sinks, then the newest tokens. What exceeds ``window``
            is cut.
        """
        cache = cls(window, sinks)
        cache._seen = [seen]
        positions = cache.window.held([seen], cache._held_columns())
        from_end = keys.shape[2] - seen + positions
        source = _rows(np.where(positions < sinks, positions, from_end))
        cache.keys = mx.take_along_axis(keys, source, axis=2)
        cache.values = mx.take_along_axis(values, source, axis=2)
        return cache

    def in_order(self) -> tuple[mx.array, mx.array]:
        """The keys and values held, (1, H, T, D) each, in order of time."""
        positions = self.window.held(self._seen, self._held_columns())
        order = _rows(np.argsort(positions))
        return (
            mx.take_along_axis(self.keys, order, axis=2),
            mx.take_along_axis(self.values, order, axis=2),
        )

    def reserve(self, tokens: int) -> None:
        """Go on to hold what a trim of ``tokens`` brings back into the window.

        No query sees it. It takes as many columns. 0 drops it. One sequence only.

        Raises
        ------
        ValueError
            Positions are local: what a trim brings back was moved since.
        """
        self.check_reserve(tokens)
        storage = Window(self.window.size + tokens, self.window.sinks)
        seen, before = self._seen[0], self._storage
        if before == self.window:  # nothing evicted is held so far
            evicts = seen > self.window.size
            self._held_from = (seen - self.window.recent) * evicts
        self._storage = storage
        if self.keys is not None and storage != before:
            (positions,) = storage.held([seen], self._held_columns())
            source = _rows(np.array([[before.column(p) for p in positions]]))
            self.keys = mx.take_along_axis(self.keys, source, axis=2)
            self.values = mx.take_along_axis(self.values, source, axis=2)

    def check_reserve(self, tokens: int) -> None:
        """Refuse what ``reserve`` refuses, and change nothing.

        Raises
        ------
        ValueError
            As from ``reserve``.
        """
        if tokens and self.rotation is not None:
            raise ValueError(
                "a window with position_mode='local' can't be used with a draft model: "
                "what it evicts can't be given back; use 'absolute'"
            )

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Store a step's keys and values; return what its queries attend to.

        Parameters
        ----------
        keys, values : mx.array, shape (B, H, L, D)
            Of the new tokens.

        Returns
        -------
        tuple of mx.array, shape (B, H, T, D)
            In the order of ``make_mask(L)``'s columns, which isn't the order of time.
        """
        L = keys.shape[2]
        if L == 0:
            return (keys, values) if self.keys is None else self._held_arrays()
        update = self._append if self._fits(L) else self._replace
        fetched = update(keys, values)
        self._seen = [seen + L for seen in self._seen]
        if self._storage != self.window and self._seen[0] > self._storage.size:
            overwritten = self._seen[0] - self._storage.recent
            self._held_from = max(self._held_from, overwritten)
        if self._ends is None:
            self.keys = self._positions.rebase(self.keys, self._seen)
        return fetched

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """What each of the next ``N`` queries sees of what the update will return.

        ``window_size`` is the model's own sliding window: it narrows what is recent.

        Returns
        -------
        mx.array of bool, shape (N, T), or "causal", or None
            True where a query sees a column; ``None`` where each sees all.
        """
        if self._fits(N) and not self.window.narrowed_by(window_size):
            hides = self._storage != self.window
            hides = hides and self._seen[0] + N > self.window.size
            if N == 1 and not hides:
                return None
            if not (return_array or hides):
                return "causal"
        return self._visible(N, window_size)[0, 0]

    def _fits(self, L: int) -> bool:
        """Whether L new tokens fit into columns that none of their queries needs."""
        if self._ends is not None or min(self._seen) < 0:
            return False  # padding has no column
        reserve = self._storage.size - self.window.size
        return L <= 1 + reserve or max(self._seen) + L <= self._storage.size

    def _held_columns(self, L: int = 0) -> int:
        ends = self._ends_after(L)
        return min(max(0, *ends), self._storage.size)

    def _ends_after(self, L: int) -> list[int]:
        """Tokens of each sequence after a step, without its right padding."""
        after = [seen + L for seen in self._seen]
        return after if self._ends is None else list(map(min, after, self._ends))

    def _visible(self, L: int, window_size: int | None) -> mx.array:
        step = np.array(self._seen)[:, None] + np.arange(L)
        if self._fits(L):
            held = self._storage.held(self._ends_after(L), self._held_columns(L))
            return self.window.visible(held, step, window_size)
        new, queries = np.where(step < 0, EMPTY, step), step
        if self._ends is not None:
            ends = np.array(self._ends)[:, None]
            new = np.where(step < ends, new, EMPTY)
            # Queries of padding see what the last real one sees: a query that sees
            # nothing would give NaN.
            queries = np.minimum(step, ends - 1)
        held = self._storage.held(self._ends_after(0), self._held_columns())
        keys = np.concatenate([held, new], axis=1)
        return self.window.visible(keys, queries, window_size)

    def _append(self, keys, values):
        """Put a step's tokens into their columns."""
        L = keys.shape[2]
        ends = [seen + L for seen in self._seen]
        held = min(max(ends), self._storage.size)
        self._grow(keys, values, held)
        column = self._storage.column
        columns = [[column(n) for n in range(end - L, end)] for end in ends]
        self.values = _put(self.values, columns, values)
        if sinks := self._positions.sinks_to_move(ends):
            # The new keys come after: in a shorter sequence they may be sinks.
            moved = self.keys[..., :sinks, :]
            moved = self._positions.move_sinks(moved, self._seen, ends)
            self.keys[..., :sinks, :] = moved
        self.keys = _put(self.keys, columns, keys)
        return self._held_arrays(held)

    def _held_arrays(self, held: int | None = None) -> tuple[mx.array, mx.array]:
        """Keys and values without the columns that are still free."""
        held = self._held_columns() if held is None else held
        if held == self.keys.shape[2]:
            return self.keys, self.values
        return self.keys[..., :held, :], self.values[..., :held, :]

    def _grow(self, keys, values, columns: int) -> None:
        """Allocate at least that many columns, and at most a ``step`` more."""
        missing = columns - (0 if self.keys is None else self.keys.shape[2])
        if missing <= 0:
            return
        extra = missing + min(self._storage.size - columns, -columns % self.step)

        def grown(held, new):
            B, H, _, D = new.shape
            free = mx.zeros((B, H, extra, D), new.dtype)
            return free if held is None else mx.concatenate([held, free], axis=2)

        self.keys, self.values = grown(self.keys, keys), grown(self.values, values)

    def _replace(self, keys, values):
        """Return what was held and all of the step; hold what the window keeps."""
        L, ends = keys.shape[2], self._ends_after(keys.shape[2])
        held = 0
        if self.keys is not None:
            held = self._held_columns()
            keys = mx.concatenate([self.keys[..., :held, :], keys], axis=2)
            values = mx.concatenate([self.values[..., :held, :], values], axis=2)
        T, seen = keys.shape[2], np.array(self._seen)[:, None]

        def columns_of(positions):
            """The columns of ``keys`` that hold these positions; any for ``EMPTY``."""
            new, old = held + positions - seen, np.arange(positions.shape[1])
            return np.clip(np.where(positions >= seen, new, old), 0, max(T - 1, 0))

        source = columns_of(self._storage.held(ends, self._held_columns(L)))
        if sinks := self._positions.sinks_to_move(ends):
            where = _rows(columns_of(np.arange(sinks)[None]))
            moved = mx.take_along_axis(keys, where, axis=2)
            moved = self._positions.move_sinks(moved, self._seen, ends)
            keys = mx.put_along_axis(keys, where, moved, axis=2)
        self.keys, self.values = (
            mx.take_along_axis(array, _rows(source), axis=2) for array in (keys, values)
        )
        return keys, values

    def is_trimmable(self) -> bool:
        """Whether tokens can be trimmed: while none is evicted, or with a reserve.

        Not for upstream's speculative decoding without a reserve: it asks once, and
        passes over each trim that can't be done later.
        """
        if self._storage != self.window:
            return True
        return self._can_trim(1) and not _speculation_asks()

    def _can_trim(self, n: int) -> bool:
        """Whether all is held that queries see after a trim of ``n`` tokens."""
        if self._ends is not None:
            return False
        if self._storage == self.window:
            return max(self._seen) <= self.window.size
        seen = self._seen[0] - n
        return self._held_from <= max(self.window.sinks, seen - self.window.recent)

    def trim(self, n: int) -> int:
        """Trim the newest ``n`` tokens; return how many were trimmed.

        Raises
        ------
        ValueError
            Tokens were evicted: what an earlier query would see is no longer held.
        """
        self.check_trim(n)
        n = max(0, min(n, *self._seen))
        self._seen = [seen - n for seen in self._seen]
        return n

    def check_trim(self, n: int) -> None:
        """Refuse what ``trim`` refuses, and change nothing.

        Raises
        ------
        ValueError
            As from ``trim``.
        """
        n = min(n, max(0, min(self._seen)))
        if n > 0 and not self._can_trim(n):
            raise ValueError(
                f"can't trim {n} tokens: {self.evictions} were evicted, and the window "
                f"of {self.window.size} would have to hold them again; prefill anew"
            )

    def to_quantized(self, group_size: int = 64, bits: int = 4):
        raise ValueError(
            f"a {type(self).__name__} can't be quantised: leave kv_bits out, or use a "
            "cache without a window"
        )

    def _refuse_another_kind(self, other: SinkCache) -> None:
        alike = (
            type(other) is type(self)
            and other.window == self.window
            and (other.rotation is None) == (self.rotation is None)
        )
        if not alike:
            raise ValueError(
                "only caches of one kind, with the same window, sinks and position "
                "mode, make a batch"
            )
        if other._storage != other.window:
            raise ValueError(
                "a cache that a draft model is used with can't be part of a batch"
            )

    @property
    def state(self):
        rotation, positions = self.rotation, self._positions
        numbers = [
            self.window.size,
            self.window.sinks,
            0 if rotation is None else 1 + rotation.traditional,
            positions.rotations,
            *self._seen,
            *positions.moved,
        ]
        state = [mx.array(numbers)]
        if rotation is not None:
            state.append(mx.array(rotation.freqs))
        if self.keys is not None:
            held = self
            if self._storage != self.window:  # what is saved has no reserve
                held = copy.copy(self)
                held.reserve(0)
            state += held._held_arrays()
        if positions.originals is not None:
            state.append(positions.originals)
        return apart(state)

    @state.setter
    def state(self, state):
        numbers, *arrays = apart(state)
        size, sinks, kind, rotations, *each = numbers.tolist()
        rotation = None
        if kind:
            rotation = Rotation(tuple(arrays.pop(0).tolist()), traditional=kind == 2)
        B = len(each) // 2
        positions = Positions(Window(size, sinks), rotation, each[B:])
        positions.rotations = rotations
        self._start(positions, each[:B])
        if arrays:
            self.keys, self.values, *originals = arrays
            positions.originals = originals[0] if originals else None

    @classmethod
    def merge(cls, caches: list[SinkCache]) -> BatchSinkCache:
        """One cache of several sequences."""
        return BatchSinkCache.merge(caches)


class BatchSinkCache(SinkCache):
    """A ``SinkCache`` of a batch: each sequence has its own sinks and evictions.

    Padding is never held, on either side. So each token has the column that it would
    have in a cache of its sequence alone.
    """

    def __init__(
        self,
        window: int,
        sinks: int = 4,
        rotation: Rotation | None = None,
        batch_size: int = 1,
    ):
        positions = Positions(Window(window, sinks), rotation, [0] * batch_size)
        self._start(positions, [0] * batch_size)

    @property
    def offset(self) -> mx.array:
        """(B,): positions of the next tokens for the layer's rope."""
        return mx.array([s - m for s, m in zip(self._seen, self._positions.moved)])

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | None:
        """As ``SinkCache.make_mask``; an array has the shape (B, 1, N, T)."""
        if N == 1 and self._fits(1) and not self.window.narrowed_by(window_size):
            after = [min(seen + 1, self.window.size) for seen in self._seen]
            if min(after) == max(after):
                return None
        return self._visible(N, window_size)

    def prepare(self, *, left_padding=None, lengths=None, right_padding=None) -> None:
        """Announce how the prompts to come are padded, as ``BatchKVCache.prepare``."""
        if left_padding is not None:
            if self.keys is not None:
                raise ValueError("left padding goes before a sequence's first token")
            padding = integers(left_padding)
            self._seen = [seen - pad for seen, pad in zip(self._seen, padding)]
        if right_padding is not None and max(integers(right_padding)) > 0:
            lengths = integers(lengths)
            self._ends = [seen + n for seen, n in zip(self._seen, lengths)]

    def finalize(self) -> None:
        """End the right-padded prompts that ``prepare`` announced."""
        self._seen = self._ends_after(0)
        self._ends = None
        self.keys = self._positions.rebase(self.keys, self._seen)

    def filter(self, batch_indices: Any) -> None:
        """Keep these sequences only, in this order."""
        kept = integers(batch_indices)
        self._seen, self._ends = (
            rows and [rows[index] for index in kept]
            for rows in (self._seen, self._ends)
        )
        self.keys, self.values = (
            array if array is None else array[mx.array(kept)]
            for array in (self.keys, self.values)
        )
        self._positions.filter(kept)

    def extend(self, other: BatchSinkCache) -> None:
        """Add another batch's sequences after these."""
        self._refuse_another_kind(other)
        if self._ends is not None or other._ends is not None:
            raise ValueError("finalize() has to come before extend()")
        self._take([self, other])

    def extract(self, index: int) -> SinkCache:
        """One sequence, as the cache that it would have had alone."""
        seen = max(0, self._ends_after(0)[index])
        cache = SinkCache.__new__(SinkCache)
        cache._start(self._positions.extract(index, seen), [seen])
        held = cache._held_columns()
        rows = slice(index, index + 1)
        if held:
            cache.keys = mx.contiguous(self.keys[rows, :, :held])
            cache.values = mx.contiguous(self.values[rows, :, :held])
        return cache

    @classmethod
    def merge(cls, caches: list[SinkCache]) -> BatchSinkCache:
        """One cache of several sequences.

        Raises
        ------
        ValueError
            Different windows, sinks or position modes.
        """
        first = caches[0]
        for other in caches:
            first._refuse_another_kind(other)
            if other.keys is not None and other.keys.shape[0] > 1:
                raise ValueError("a SinkCache of several sequences can't be merged")
        batch = cls.__new__(cls)
        batch._take(caches)
        return batch

    def _take(self, caches: list[SinkCache]) -> None:
        """Hold what several caches of one kind hold, their sequences in order."""
        sizes = [len(cache._seen) for cache in caches]
        keys = stacked([cache.keys for cache in caches], sizes)
        values = stacked([cache.values for cache in caches], sizes)
        positions = Positions.merge([cache._positions for cache in caches])
        seen = [n for cache in caches for n in cache._seen]
        self._start(positions, seen)
        self.keys, self.values = keys, values


def _speculation_asks() -> bool:
    """Whether upstream's speculative decoding is among the nearest callers."""
    frame = sys._getframe(2)
    for _ in range(3):  # from a generator in a function that it calls
        if frame is None or frame.f_code.co_name == "speculative_generate_step":
            return frame is not None
        frame = frame.f_back
    return False


def _put(held: mx.array, columns: list[list[int]], new: mx.array) -> mx.array:
    """Write each sequence's new tokens into its columns of what is held."""
    if len(columns) == len(columns[0]) == 1:  # decode of one sequence, as fast as stock
        [[column]] = columns
        held[..., column : column + 1, :] = new
        return held
    return mx.put_along_axis(held, _rows(np.array(columns)), new, axis=2)


def _rows(columns: np.ndarray) -> mx.array:
    """Each sequence's columns as an index into its keys, (B, 1, columns, 1)."""
    return mx.array(columns.astype(np.int32)[:, None, :, None])


register(SinkCache, BatchSinkCache)
