"""Key-value caches that hold some of a prompt's rows, and count positions truly."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as upstream

from .snapkv import SnapKV, window_scores


@dataclass
class _Sequence:
    """What one sequence has beside its rows.

    ``window`` are the queries of its newest tokens, (1, H, up to W, D), as long as
    each was observed; ``firm`` counts the first rows that no trim may reach.
    """

    dropped: int = 0
    firm: int = 0
    window: mx.array | None = None


@dataclass
class _Attention:
    """How the layer attends, as its forward last told the kernel."""

    scale: float = 1.0
    sinks: mx.array | None = None
    # Why its rows can't be told apart by it; None where they can.
    unfit: str | None = "nothing was seen of its attention"


@dataclass
class _Listening:
    """State of a cache while a prompt is read and its queries are kept."""

    window: int
    fetched: tuple[mx.array, mx.array] | None = None
    before: list[mx.array | None] = field(default_factory=list)


class _Observing:
    """What a layer's cache hears of the layer's queries.

    A view made by ``observation.observed`` calls ``observe`` with what its attention
    kernel is given. Tokens that come without it end the observation window.
    """

    _sequences: list[_Sequence]
    _listening: _Listening | None = None
    _narrowed = False

    def listen(self, window: int | None) -> None:
        """Keep the last ``window`` queries from now on; ``None`` to stop."""
        self._listening = None if window is None else _Listening(window)

    def _fetched(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self._listening is not None:
            before = [sequence.window for sequence in self._sequences]
            self._listening = replace(
                self._listening, fetched=(keys, values), before=before
            )
        for sequence in self._sequences:
            sequence.window = None
        return keys, values

    def observe(
        self,
        queries: mx.array,
        keys: Any,
        values: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> None:
        """Take in what a layer's kernel was given after the last update."""
        heard, unfit = self._listening, None
        if heard is None or heard.fetched is None:
            return
        if keys is not heard.fetched[0] or values is not heard.fetched[1]:
            unfit = "its attention doesn't read the cache's rows as they are"
        elif self._narrowed:
            unfit = "it has a sliding window"
        elif isinstance(mask, mx.array) and mask.dtype != mx.bool_:
            unfit = "its attention has a bias"
        self.attention = _Attention(scale, sinks, unfit)
        self._listening = _Listening(heard.window)  # holds no rows: decode writes them
        if unfit is None:
            for index, before in enumerate(heard.before):
                new = self._real_queries(index, queries, heard.window)
                self._sequences[index].window = _newest(before, new, heard.window)

    def _real_queries(self, index: int, queries: mx.array, window: int) -> mx.array:
        return queries[index : index + 1, :, -window:]

    def make_mask(self, N: int, return_array: bool = False, window_size=None, **named):
        """As upstream's, over the rows held."""
        self._narrowed = self._narrowed or window_size is not None
        return self._mask(N, return_array, window_size, **named)

    def is_trimmable(self) -> bool:
        return True

    def to_quantized(self, group_size: int = 64, bits: int = 4):
        raise ValueError(
            f"a {type(self).__name__} can't be quantised: leave kv_bits out, or the "
            "budget of the key-value cache (kv_budget)"
        )

    def _refuse_to_trim(self, n: int) -> None:
        raise ValueError(
            f"can't trim {n} tokens: some of them are no longer held since the prompt "
            "was compacted; prefill anew"
        )


def _newest(before: mx.array | None, new: mx.array, window: int) -> mx.array:
    """The last queries of both; a copy, which doesn't hold on to all of a step."""
    if before is not None and new.shape[2] < window:
        new = mx.concatenate([before, new], axis=2)
    return mx.contiguous(new[..., -window:, :])


class CompactCache(_Observing, upstream._BaseCache):
    """One layer's keys and values of one sequence, those of its prompt compacted.

    ``offset`` is the true position of the next token; ``size()`` counts the rows held.
    Rows keep the rotation of their own positions, so that attention after a compaction
    differs from the full cache's by what was dropped alone. ``merge`` makes a
    ``BatchCompactCache`` of several.
    """

    def __init__(self, rows: upstream.KVCache | None = None):
        self._rows = upstream.KVCache() if rows is None else rows
        self._sequences = [_Sequence()]
        self.attention = _Attention()
        # Where it is kept for prompts to come, nobody knows yet what they would trim.
        self.shelved = False

    @property
    def _sequence(self) -> _Sequence:
        return self._sequences[0]

    @property
    def offset(self) -> int:
        return self._rows.offset + self._sequence.dropped

    @property
    def dropped(self) -> int:
        """Number of tokens whose rows are gone."""
        return self._sequence.dropped

    @property
    def observed(self) -> bool:
        """Whether the queries of its newest tokens are known."""
        return self._sequence.window is not None

    def size(self) -> int:
        return self._rows.offset

    def empty(self) -> bool:
        return self._rows.empty()

    @property
    def nbytes(self) -> int:
        window = self._sequence.window
        return self._rows.nbytes + (0 if window is None else window.nbytes)

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Append a step's rows, (1, H, L, D) each; all that are held."""
        return self._fetched(*self._rows.update_and_fetch(keys, values))

    def _mask(self, N, return_array, window_size):
        return self._rows.make_mask(
            N, return_array=return_array, window_size=window_size
        )

    def rows(self) -> tuple[mx.array, mx.array]:
        """The keys and values held, (1, H, size(), D) each."""
        held = self.size()
        return self._rows.keys[..., :held, :], self._rows.values[..., :held, :]

    def compact(self, method: SnapKV) -> None:
        """Keep the rows that a method chooses, where its budget doesn't cover all.

        Whole stays, with a warning, what a prompt that wasn't observed has left.
        """
        T, sequence = self.size(), self._sequence
        if method.covers(T, self.offset):
            return
        if not self.observed:
            warnings.warn(
                f"a cache of {T} rows is left whole: the queries of its last tokens "
                "weren't observed",
                stacklevel=2,
            )
            return
        keys, values = self.rows()
        attention = self.attention
        scores = window_scores(
            sequence.window, keys, attention.scale, method.kernel, attention.sinks
        )
        columns = method.columns(scores)[..., None]
        kept = upstream.KVCache()
        kept.keys = mx.take_along_axis(keys, columns, axis=2)
        kept.values = mx.take_along_axis(values, columns, axis=2)
        kept.offset = method.budget
        # Else the rows that go would stay until somebody asks for those that don't.
        mx.eval(kept.keys, kept.values)
        self._rows = kept
        recent = method.floor[1]
        self._sequences = [
            _Sequence(sequence.dropped + T - kept.offset, kept.offset - recent)
        ]

    def is_trimmable(self) -> bool:
        """Whether tokens may be trimmed: one that is shelved and compacted isn't."""
        return not (self.shelved and self.dropped)

    def trim(self, n: int) -> int:
        """Forget the newest ``n`` tokens; returns how many those were.

        Those that came after a compaction and the recent rows that it kept are held in
        full, and so can be trimmed.

        Raises
        ------
        ValueError
            The tokens go back to where rows were dropped.
        """
        n = max(0, min(n, self.offset))
        sequence = self._sequence
        if self.size() - n < sequence.firm:
            self._refuse_to_trim(n)
        if n and sequence.window is not None:
            left = sequence.window[..., :-n, :]
            sequence.window = left if left.shape[2] else None
        return self._rows.trim(n)

    @property
    def state(self):
        sequence, attention = self._sequence, self.attention
        extra = [a for a in (sequence.window, attention.sinks) if a is not None]
        observed = sequence.window is not None, attention.sinks is not None
        numbers = [sequence.dropped, sequence.firm, attention.scale, *observed]
        rows = [] if self.empty() else self.rows()
        return [mx.array(numbers, mx.float32), *extra, *rows]

    @state.setter
    def state(self, state):
        numbers, *arrays = state
        dropped, firm, scale, window, sinks = numbers.tolist()
        self.__init__()
        window = arrays.pop(0) if window else None
        sinks = arrays.pop(0) if sinks else None
        self._sequences = [_Sequence(int(dropped), int(firm), window)]
        self.attention = _Attention(scale, sinks, _Attention.unfit)
        if arrays:
            self._rows.keys, self._rows.values = arrays
            self._rows.offset = arrays[0].shape[2]

    @classmethod
    def from_state(cls, state, meta_state=None):
        """As upstream's; mlx-lm 0.31 gives a ``meta_state``, which is always empty."""
        cache = cls.__new__(cls)
        cache.state = state
        return cache

    @classmethod
    def merge(cls, caches: list[CompactCache]) -> BatchCompactCache:
        """One cache of several sequences."""
        return BatchCompactCache.merge(caches)


class BatchCompactCache(_Observing, upstream.BatchKVCache):
    """The same for a batch: ``BatchKVCache`` with positions apart from columns."""

    def __init__(self, left_padding: list[int]):
        super().__init__(left_padding)
        self._sequences = [_Sequence() for _ in left_padding]
        self.attention = _Attention()
        # Real tokens still to come of right-padded prompts.
        self._coming: list[int] | None = None

    def prepare(self, *, left_padding=None, lengths=None, right_padding=None) -> None:
        """Announce how the prompts to come are padded, as upstream's."""
        super().prepare(
            left_padding=left_padding, lengths=lengths, right_padding=right_padding
        )
        if right_padding is not None and lengths is not None:
            self._coming = _integers(lengths)

    def finalize(self) -> None:
        """The prompts' padding on the right is over."""
        super().finalize()
        self._coming = None

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Append a step's rows, (B, H, L, D) each; all that are held."""
        return self._fetched(*super().update_and_fetch(keys, values))

    def _mask(self, N, return_array, window_size, **named):
        return upstream.BatchKVCache.make_mask(
            self, N, return_array, window_size=window_size, **named
        )

    def _real_queries(self, index, queries, window):
        if self._coming is None:
            return super()._real_queries(index, queries, window)
        real = min(queries.shape[2], self._coming[index])
        self._coming[index] -= real
        return queries[index : index + 1, :, max(0, real - window) : real]

    def compact(self, method: SnapKV) -> BatchCompactCache:
        """A batch in which each sequence is compacted on its own."""
        if self.size() <= method.budget:
            return self
        sequences = [self.extract(index) for index in range(len(self._sequences))]
        for sequence in sequences:
            sequence.compact(method)
        return self.merge(sequences)

    def trim(self, n: int) -> int:
        """As ``CompactCache.trim``, for every sequence."""
        rows = [self.size() - padding for padding in self.left_padding.tolist()]
        for held, sequence in zip(rows, self._sequences):
            if sequence.dropped and held - n < sequence.firm:
                self._refuse_to_trim(n)
        for sequence in self._sequences:
            sequence.window = None
        return super().trim(n)

    def filter(self, batch_indices: Any) -> None:
        """Keep these sequences only, in this order."""
        super().filter(batch_indices)
        self._sequences = [self._sequences[i] for i in _integers(batch_indices)]

    def extend(self, other: BatchCompactCache) -> None:
        """Add another batch's sequences after these."""
        super().extend(other)
        self._sequences = self._sequences + other._sequences
        if self.attention.unfit:
            self.attention = other.attention

    def extract(self, index: int) -> CompactCache:
        """One sequence, as the cache that it would have had alone."""
        cache = CompactCache()
        if self.keys is not None:
            cache = CompactCache(super().extract(index))
        cache._sequences = [replace(self._sequences[index])]
        cache.attention = self.attention
        return cache

    @classmethod
    def merge(cls, caches: list[CompactCache]) -> BatchCompactCache:
        """One cache of several sequences."""
        if all(cache.empty() for cache in caches):
            batch = cls([0] * len(caches))
        else:
            batch = super().merge([cache._rows for cache in caches])
        batch._sequences = [replace(cache._sequence) for cache in caches]
        dropped = [cache.dropped for cache in caches]
        batch.offset = batch.offset + mx.array(dropped)
        for cache in caches:
            if cache.attention.unfit is None:
                batch.attention = cache.attention
        return batch

    @property
    def state(self):
        windows = [sequence.window for sequence in self._sequences]
        rows = [] if self.keys is None else [*super().state]
        return [*rows, *(window for window in windows if window is not None)]

    @state.setter
    def state(self, state):
        raise ValueError("a batch of compacted caches is saved a sequence at a time")


def _integers(numbers: Any) -> list[int]:
    return numbers.tolist() if isinstance(numbers, mx.array) else list(numbers)


# upstream.load_prompt_cache looks its classes up by name among that module's own.
for _kind in (CompactCache, BatchCompactCache):
    vars(upstream).setdefault(_kind.__name__, _kind)
