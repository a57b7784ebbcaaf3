"""Recording a model's selections while it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache

from ..patches.patch import upstream_of
from ..patches.registry import check_policy, reached
from ..policy import SinkPolicy
from ..sparse.selection import watching
from ..upstream.hooks import hooked, subclass
from ..upstream.kernel import KERNEL, calls_kernel
from .coverage import row_coverage
from .recording import ProbeError, Recording
from .replay import dense_attention

# Queries whose attention is held at the same time, all heads by all columns.
AT_ONCE = 8


@contextmanager
def probe(
    model: nn.Module,
    policy: SinkPolicy | None = None,
    *,
    block: int = 256,
    queries: int = 8,
) -> Iterator[Recording]:
    """Record how much of dense attention each layer's indexer selects.

    ::

        with mlx_sinks.probe(model) as recording:
            model(tokens, cache=make_prompt_cache(model))
        recording.metric("mass").mean(axis=1)  # by layer

    The model selects as it would without a probe: by the policy that is in force, or by
    upstream's own code. It runs slower, since each query that is looked at is evaluated
    at once. Queries are picked by position: neither the cut into calls nor a cache
    changes which. In a batch every sequence is looked at, left padding excepted; right
    padding counts as tokens. A probed model may run in one thread at a time. Functions
    that ``mx.compile`` traced before aren't recorded, and none can be traced inside.

    Parameters
    ----------
    model : mlx.nn.Module
        With layers that a patch reaches.
    policy : SinkPolicy, optional
        What the guarantee would keep; by default ``SinkPolicy()``.
    block : int, default=256
        Positions that are averaged into one value.
    queries : int, default=8
        Queries of a block to look at, evenly spaced; at most ``block``.

    Yields
    ------
    Recording

    Raises
    ------
    ProbeError
        A layer's selection can't be recorded, or another probe records it already.
    ValueError
        The model selects nowhere, or a count is out of range; a ``PolicyError`` where
        the policy doesn't fit in ``index_topk``.
    PatchError
        As from ``install``.
    """
    check_policy(policy)
    if not 0 < queries <= block:
        raise ValueError(f"queries must be from 1 to block={block}, not {queries}")
    policy = SinkPolicy() if policy is None else policy
    with reached(model) as choosers:
        attentions = {
            name: part
            for name, part in reversed(model.named_modules())
            if hasattr(part, "indexer")
        }
        if not attentions or not all(
            calls_kernel(upstream_of(type(part).__call__))
            for part in attentions.values()
        ):
            raise ProbeError(
                f"{type(model).__name__} can't be probed: a layer with an indexer "
                f"doesn't call mlx-lm's {KERNEL} itself, or another probe "
                "records already"
            )
        index_topk = next(iter(attentions.values())).indexer.index_topk
        policy = policy.fit(index_topk)
        recording = Recording([*attentions], index_topk, policy, block)
        recorder = _Recorder(recording, queries, {id(part) for part in choosers})
        recorded = [
            (part, recorder.recorded(number, part))
            for number, part in enumerate(attentions.values())
        ]
        with hooked(recorded):
            yield recording


def _empty_cache(attention: nn.Module) -> list[KVCache]:
    """Caches for the keys of a layer and of its indexer, if that has any."""
    own = KVCache()
    keyed = isinstance(attention.indexer, nn.Module)
    return [own, KVCache() if keyed else own]


class _Recorder:
    """Looks at the selections of a model's layers as they are made."""

    def __init__(self, recording: Recording, queries: int, choosers: set[int]):
        self.recording = recording
        self.queries = queries
        self.choosers = choosers
        # What the last layer with an indexer of its own selected from: scores,
        # left_padding and mask. Later layers may reuse its selection.
        self.choice: tuple | None = None

    def recorded(self, number: int, attention: nn.Module) -> type:
        """A subclass of the layer's class that records each call."""
        forward = type(attention).__call__
        chooses = any(id(part) in self.choosers for part in attention.modules())

        def call(layer, x, mask=None, cache=None):
            if layer is not attention:  # a copy that was made in the meantime
                return forward(layer, x, mask, cache)
            cache = _empty_cache(layer) if cache is None else cache
            if chooses:
                self.choice = None
            with watching(self.take):
                output = forward(layer, x, mask, cache)
            if self.choice is not None and self.choice[0].shape[2] == x.shape[1]:
                replayed = upstream_of(forward)
                dense = functools.partial(dense_attention, replayed, layer)
                self.look(number, dense, layer.indexer.index_topk, x, cache[0])
            return output

        return subclass(type(attention), __call__=call)

    def take(self, *choice) -> None:
        self.choice = choice

    def look(
        self,
        number: int,
        dense: Callable[..., mx.array],
        index_topk: int,
        x: mx.array,
        cache: Any,
    ) -> None:
        """Add the metrics of this call's queries to the recording."""
        scores, left_padding, mask = self.choice
        B, _, L, T = scores.shape
        shown = mx.broadcast_to(True if mask is None else mask, (B, 1, L, T))
        firsts = [0] * B if left_padding is None else left_padding.tolist()
        for b, first in enumerate(firsts):
            keys = cache.keys[b : b + 1, :, :T]
            values = cache.values[b : b + 1, :, :T]
            chosen = [i for i in range(L) if self.chosen(T - L + i - first)]
            for start in range(0, len(chosen), AT_ONCE):
                rows = chosen[start : start + AT_ONCE]
                columns = mx.array(rows) + (T - L)
                visible = shown[b, 0, rows] & (mx.arange(T) <= columns[:, None])
                visible &= mx.arange(T) >= first
                attended = dense(x[b, rows], visible, columns - first, keys, values)
                metrics = [
                    row_coverage(
                        scores[b : b + 1, :, i : i + 1, : T - L + i + 1],
                        attended[n, :, : T - L + i + 1],
                        index_topk,
                        self.recording.policy,
                        mx.array([first]),
                        visible[n, : T - L + i + 1].reshape(1, 1, 1, -1),
                    )
                    for n, i in enumerate(rows)
                ]
                for i, row in zip(rows, np.array(mx.stack(metrics))):
                    self.recording.add(number, T - L + i - first, row)

    def chosen(self, position: int) -> bool:
        """Whether to look at a query: evenly spaced in a block, past ``index_topk``."""
        block = self.recording.block
        spaced = position % block * self.queries % block < self.queries
        return spaced and position >= self.recording.index_topk
