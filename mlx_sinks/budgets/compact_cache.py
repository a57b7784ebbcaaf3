"""Key-value caches that hold some of a prompt's rows, at their true positions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as upstream

from ..upstream.caches import OwnCache, apart, integers, register
from .query_window import Observation, QueryWindow
from .snapkv import SnapKV, window_scores


@dataclass
class _Sequence:
    """What is known of one sequence besides its rows.

    Attributes
    ----------
    seen : int
        Tokens seen so far; negative while left padding is read.
    dropped : int
        How many of them have no row any more.
    fixed : int
        Number of first rows that can't be trimmed: tokens between them were dropped.
    window : QueryWindow
        The newest tokens' queries, as far as they were observed.
    """

    seen: int = 0
    dropped: int = 0
    fixed: int = 0
    window: QueryWindow = QueryWindow()

    @property
    def observed(self) -> bool:
        return self.window.reaches(self.seen)

    def trim(self, n: int) -> None:
        self.seen -= n
        self.window = self.window.trimmed(self.seen)


UNSEEN = "nothing was seen of its attention"


@dataclass
class _Attention:
    """How the layer attends, by its last call of the kernel."""

    scale: float = 1.0
    sinks: mx.array | None = None
    # Why its attention can't score the rows; None where it can.
    unfit: str | None = UNSEEN


class _Compact(OwnCache):
    """An upstream cache for the rows, and what is known of each sequence.

    A view made by ``observation.observed`` calls ``observe`` with what its attention
    kernel is given.
    """

    def __init__(self, rows: Any, sequences: list[_Sequence]):
        self._rows = rows
        self._sequences = sequences
        self.attention = _Attention()
        self._observation: Observation | None = None
        self._narrowed = False

    def size(self) -> int:
        return self._rows.size()

    def empty(self) -> bool:
        return self._rows.empty()

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes + sum(s.window.nbytes for s in self._sequences)

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Append a step's rows, (B, H, L, D) each; return all that are held."""
        steps = self._real(keys.shape[2])
        for sequence, step in zip(self._sequences, steps):
            sequence.seen += step
        fetched = self._rows.update_and_fetch(keys, values)
        if self._observation is not None:
            self._observation = Observation(self._observation.W, fetched, steps)
        return fetched

    def _real(self, L: int) -> list[int]:
        """How many of a step's tokens belong to each sequence."""
        return [L]

    @property
    def observed(self) -> bool:
        """Whether any sequence's newest tokens had their queries observed."""
        return any(sequence.observed for sequence in self._sequences)

    def why_skipped(self, method: SnapKV) -> str | None:
        """Why more rows are held than a method would keep; ``None`` if no more are."""
        rows = [(s.seen - s.dropped, s.seen) for s in self._sequences]
        if all(method.covers(held, seen) for held, seen in rows):
            return None
        unseen = "the queries of its last tokens weren't observed"
        return self.attention.unfit or unseen

    def make_mask(self, N: int, return_array: bool = False, window_size=None):
        """Upstream's mask over the rows held."""
        self._narrowed = self._narrowed or window_size is not None
        return self._rows.make_mask(
            N, return_array=return_array, window_size=window_size
        )

    def keep_queries(self, window_size: int | None) -> None:
        """Keep the last ``window_size`` queries from now on; ``None`` to stop."""
        self._observation = None if window_size is None else Observation(window_size)

    def observe(
        self,
        queries: mx.array,
        keys: Any,
        values: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> None:
        """Keep the queries that a layer's kernel was given after the last update."""
        step, unfit = self._observation, None
        if step is None or step.fetched is None:
            return
        if keys is not step.fetched[0] or values is not step.fetched[1]:
            unfit = "its attention doesn't read the cache's rows as they are"
        elif self._narrowed:
            unfit = "it has a sliding window"
        elif isinstance(mask, mx.array) and mask.dtype != mx.bool_:
            unfit = "its attention has a bias"
        self.attention = _Attention(scale, sinks, unfit)
        # A reference to the rows would make the next update copy them.
        self._observation = Observation(step.W)
        if unfit is None:
            for sequence, new in zip(self._sequences, step.of_each(queries)):
                sequence.window = sequence.window.after(new, sequence.seen, step.W)

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Trim the newest ``n`` tokens; return how many were trimmed.

        Tokens that came after a compaction can be trimmed, and so can the recent rows
        that it kept.

        Raises
        ------
        ValueError
            The trim would reach rows between which tokens were dropped.
        """
        self.check_trim(n)
        n = max(0, min(n, max(sequence.seen for sequence in self._sequences)))
        for sequence in self._sequences:
            sequence.trim(n)
        return self._rows.trim(n)

    def check_trim(self, n: int) -> None:
        """Refuse what ``trim`` refuses, and change nothing.

        Raises
        ------
        ValueError
            As from ``trim``.
        """
        n = max(0, min(n, max(sequence.seen for sequence in self._sequences)))
        for sequence in self._sequences:
            rows = sequence.seen - sequence.dropped
            if sequence.dropped and rows - n < sequence.fixed:
                raise ValueError(
                    f"can't trim {n} tokens: some of them are no longer held since the "
                    "prompt was compacted; prefill anew"
                )

    def to_quantized(self, group_size: int = 64, bits: int = 4):
        raise ValueError(
            f"a {type(self).__name__} can't be quantised: leave kv_bits out, or the "
            "budget of the key-value cache (kv_budget)"
        )


class CompactCache(_Compact):
    """One layer's keys and values of one sequence, whose prompt can be compacted.

    ``offset`` is the true position of the next token; ``size()`` counts the rows held.
    Rows keep the rotation of their own positions, so that attention after a compaction
    differs from the full cache's only by what was dropped. ``merge`` makes a
    ``BatchCompactCache`` of several.

    Parameters
    ----------
    rows : KVCache, optional
        Rows to start from, of which none was dropped.
    """

    def __init__(self, rows: upstream.KVCache | None = None):
        rows = upstream.KVCache() if rows is None else rows
        super().__init__(rows, [_Sequence(rows.offset)])

    @property
    def _sequence(self) -> _Sequence:
        return self._sequences[0]

    @property
    def offset(self) -> int:
        return self._sequence.seen

    @property
    def dropped(self) -> int:
        """Number of tokens whose rows are gone."""
        return self._sequence.dropped

    @property
    def observed_queries(self) -> int:
        """How many of the newest tokens have their queries in the window."""
        sequence = self._sequence
        return sequence.window.queries.shape[2] if sequence.observed else 0

    def rows(self) -> tuple[mx.array, mx.array]:
        """The keys and values held, (1, H, size(), D) each."""
        held = self.size()
        return self._rows.keys[..., :held, :], self._rows.values[..., :held, :]

    def compact(self, method: SnapKV) -> None:
        """Keep the rows that a method chooses, where its budget doesn't cover all.

        Raises
        ------
        ValueError
            The queries of the newest tokens weren't observed.
        """
        T, sequence, attention = self.size(), self._sequence, self.attention
        if method.covers(T, self.offset):
            return
        if not self.observed:
            raise ValueError("the queries of the newest tokens weren't observed")
        keys, values = self.rows()
        queries = sequence.window.queries
        scores = window_scores(
            queries, keys, attention.scale, method.kernel_size, attention.sinks
        )
        columns = method.columns(scores)[..., None]
        kept = upstream.KVCache()
        kept.keys = mx.take_along_axis(keys, columns, axis=2)
        kept.values = mx.take_along_axis(values, columns, axis=2)
        kept.offset = method.budget
        # Unevaluated, the new arrays would keep the dropped rows in memory.
        mx.eval(kept.keys, kept.values)
        self._rows = kept
        # The newest rows have no gaps, unless an earlier turn's compaction left some.
        recent = min(method.floor[1], T - sequence.fixed)
        self._sequences = [
            _Sequence(
                seen=sequence.seen,
                dropped=sequence.seen - kept.offset,
                fixed=kept.offset - recent,
            )
        ]

    @property
    def state(self):
        sequence, attention = self._sequence, self.attention
        window = sequence.window
        numbers = [sequence.dropped, sequence.fixed, window.end, attention.scale]
        extra = window.queries, attention.sinks
        numbers += [array is not None for array in extra]
        rows = [] if self.empty() else self.rows()
        held = [array for array in extra if array is not None]
        return apart([mx.array(numbers, mx.float32), *held, *rows])

    @state.setter
    def state(self, state):
        numbers, *arrays = apart(state)
        dropped, fixed, end, scale, queries, sinks = numbers.tolist()
        queries = arrays.pop(0) if queries else None
        sinks = arrays.pop(0) if sinks else None
        rows = upstream.KVCache()
        if arrays:
            rows.keys, rows.values = arrays
            rows.offset = rows.keys.shape[2]
        self.__init__(rows)
        dropped, fixed, end = map(int, (dropped, fixed, end))
        seen, window = rows.offset + dropped, QueryWindow(queries, end)
        self._sequences = [_Sequence(seen, dropped, fixed, window)]
        self.attention = _Attention(scale, sinks)

    @classmethod
    def merge(cls, caches: list[Any]) -> BatchCompactCache:
        """One cache of several sequences."""
        return BatchCompactCache.merge(caches)


class BatchCompactCache(_Compact):
    """A ``CompactCache`` of a batch: its positions don't follow from its columns."""

    def __init__(self, left_padding: list[int]):
        rows = upstream.BatchKVCache(left_padding)
        super().__init__(rows, [_Sequence(-padding) for padding in left_padding])
        # How many real tokens of each right-padded prompt are still to come.
        self._coming: list[int] | None = None

    @property
    def offset(self) -> mx.array:
        """(B,): positions of the next tokens."""
        return self._rows.offset

    @property
    def left_padding(self) -> mx.array:
        """(B,): columns before each sequence's first row."""
        return self._rows.left_padding

    def prepare(self, *, left_padding=None, lengths=None, right_padding=None) -> None:
        """Announce how the prompts to come are padded, as ``BatchKVCache.prepare``."""
        self._rows.prepare(
            left_padding=left_padding, lengths=lengths, right_padding=right_padding
        )
        if left_padding is not None:
            for sequence, padding in zip(self._sequences, integers(left_padding)):
                sequence.seen -= padding
        if right_padding is not None and lengths is not None:
            self._coming = integers(lengths)

    def finalize(self) -> None:
        """End the right-padded prompts that ``prepare`` announced."""
        self._rows.finalize()
        self._coming = None

    def _real(self, L: int) -> list[int]:
        if self._coming is None:
            return [L] * len(self._sequences)
        steps = [min(L, coming) for coming in self._coming]
        self._coming = [coming - step for coming, step in zip(self._coming, steps)]
        return steps

    def compact(self, method: SnapKV) -> BatchCompactCache:
        """A batch in which each sequence that was observed is compacted on its own."""
        if self.size() <= method.budget:
            return self
        sequences = [self.extract(index) for index in range(len(self._sequences))]
        for sequence in sequences:
            if sequence.observed:
                sequence.compact(method)
        return self.merge(sequences)

    def filter(self, batch_indices: Any) -> None:
        """Keep these sequences only, in this order."""
        self._rows.filter(batch_indices)
        self._sequences = [self._sequences[i] for i in integers(batch_indices)]

    @classmethod
    def of(cls, rows: upstream.BatchKVCache) -> BatchCompactCache:
        """A batch that continues from upstream's, of which no row was dropped."""
        batch = cls([0] * len(rows.offset))
        batch._rows = rows
        batch._sequences = [_Sequence(seen) for seen in rows.offset.tolist()]
        return batch

    def extend(self, other: BatchCompactCache) -> None:
        """Add another batch's sequences after these."""
        self._rows.extend(other._rows)
        self._sequences = self._sequences + other._sequences
        if self.attention.unfit:
            self.attention = other.attention

    def extract(self, index: int) -> CompactCache:
        """One sequence, as the cache that it would have had alone."""
        cache = CompactCache(None if self.empty() else self._rows.extract(index))
        cache._sequences = [replace(self._sequences[index])]
        cache.attention = self.attention
        return cache

    @classmethod
    def merge(cls, caches: list[Any]) -> BatchCompactCache:
        """One cache of several sequences; a plain ``KVCache`` has dropped no row."""
        plain = upstream.KVCache
        caches = [CompactCache(c) if type(c) is plain else c for c in caches]
        batch = cls([0] * len(caches))
        batch._rows = upstream.BatchKVCache.merge([cache._rows for cache in caches])
        dropped = mx.array([cache.dropped for cache in caches])
        batch._rows.offset = batch._rows.offset + dropped
        batch._sequences = [replace(cache._sequence) for cache in caches]
        for cache in caches:
            if cache.attention.unfit is None:
                batch.attention = cache.attention
        return batch

    @property
    def state(self):
        rows = [] if self.empty() else [*self._rows.state]
        windows = [s.window.queries for s in self._sequences]
        return [*rows, *(queries for queries in windows if queries is not None)]

    @state.setter
    def state(self, state):
        raise ValueError("a batch of compacted caches is saved a sequence at a time")


register(CompactCache, BatchCompactCache)
