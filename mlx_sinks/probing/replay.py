"""A layer's dense attention for a few of its queries, from the layer's own code.

Every kind of model projects and rotates its queries and keys in its own way. So the
layer's forward runs once more for those queries. It reads a cache that takes no new
keys. In place of the attention kernel it calls a function that records its arguments
and ends the run. The model, its module and its cache stay as they are.
"""

from __future__ import annotations

import contextlib
import types
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..upstream.kernel import with_kernel


class _Seen(Exception):
    """Ends a replayed forward once the kernel has been given everything."""


class _WithoutIndexer:
    """A layer as its own forward sees it, except that every column is selected."""

    def __init__(self, attention: nn.Module):
        self._attention = attention

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attention, name)

    @staticmethod
    def indexer(*_, **__) -> None:
        return None


@dataclass
class _Filled:
    """A cache that already holds the queries' keys and takes no more."""

    keys: mx.array
    values: mx.array
    offset: Any

    def update_and_fetch(self, keys, values):
        return self.keys, self.values


def dense_attention(
    forward: types.FunctionType,
    attention: nn.Module,
    x: mx.array,
    mask: mx.array,
    positions: mx.array,
    keys: mx.array,
    values: mx.array,
) -> mx.array:
    """The attention of queries to all that they see, without a selection.

    Parameters
    ----------
    forward : function
        The ``__call__`` of the layer's class, for which ``calls_kernel`` holds.
    attention : mlx.nn.Module
        A layer with an indexer.
    x : mx.array, shape (N, hidden_size)
        What the layer was called with, at N queries of one sequence.
    mask : mx.array of bool, shape (N, T)
        True where a query sees a column.
    positions : mx.array of int, shape (N,)
        The queries' positions in their sequence, for the layer's rope.
    keys, values : mx.array, shape (1, heads, T, any)
        The sequence's keys and values, from the layer's cache.

    Returns
    -------
    mx.array of float32, shape (N, H, T)
    """
    T = mask.shape[-1]
    filled = _Filled(keys, values, positions)
    given = {}

    def kernel(queries, keys, values, *_, scale, mask=None, **__):
        given.update(queries=queries, keys=keys, scale=scale, mask=mask)
        raise _Seen

    replayed = with_kernel(forward, kernel)
    with contextlib.suppress(_Seen):
        replayed(
            _WithoutIndexer(attention), x[:, None], mask[:, None, None], [filled] * 2
        )
    N, H, _, D = given["queries"].shape
    keys = given["keys"].astype(mx.float32)
    queries = given["queries"].astype(mx.float32).reshape(N, keys.shape[1], -1, D)
    logits = (queries * given["scale"]) @ keys.swapaxes(-1, -2)
    logits, extra = logits.reshape(N, H, T), given["mask"]
    if extra is not None and extra.dtype != mx.bool_:
        logits += extra.reshape(N, -1, T)
    return mx.softmax(mx.where(mask[:, None], logits, -mx.inf), axis=-1)
