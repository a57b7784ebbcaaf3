"""Attention of several queries to their selected columns alone.

DSA selects ``index_topk`` columns for each query. mlx-lm attends to those alone in
steps of one token. In longer steps it turns the selection into a mask, and attends to
all. Upstream file: ``mlx_lm/models/deepseek_v32.py``, ``DeepseekV32Attention``.
Sources: the DeepSeek-V3.2 report; "absorbed" queries are DeepSeek-V2's.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import BatchKVCache, KVCache

from ..upstream.kernel import KERNEL, with_kernel
from .blocks import by_blocks

UPSTREAM, ABSORBED, GATHERED = WAYS = ("upstream", "absorbed", "gathered")


@dataclass(frozen=True)
class Shape:
    """What a layer's attention costs by.

    Parameters
    ----------
    heads, rank, rope, nope, values : int
        Heads, width of a latent, and widths of a head's rotary part, of the rest of its
        query, and of its values.
    """

    heads: int
    rank: int
    rope: int
    nope: int
    values: int

    @classmethod
    def of(cls, attention: nn.Module) -> Shape:
        return cls(
            attention.num_heads,
            attention.kv_lora_rank,
            attention.qk_rope_head_dim,
            attention.qk_nope_head_dim,
            attention.v_head_dim,
        )

    def products(self, way: str, index_topk: int, L: int, T: int) -> float:
        """Multiplications a query and head of one way to attend.

        ``upstream`` expands all T latents for each head, once for the L queries.
        """
        if way == GATHERED:
            return index_topk * (2 * self.rank + self.rope)
        if way == ABSORBED:
            return T * (2 * self.rank + self.rope)
        expanded = self.nope + self.values
        return T * (self.rope + expanded) + T * self.rank * expanded / L


@dataclass(frozen=True)
class Costs:
    """What a product takes, by way, in units of upstream's; and a gathered number.

    Measured: see docs/performance.md.
    """

    absorbed: float
    gathered: float
    number: float

    def of(self, way: str, shape: Shape, index_topk: int, L: int, T: int) -> float:
        """The cost of a query and head."""
        products = shape.products(way, index_topk, L, T)
        if way == GATHERED:
            numbers = index_topk * (shape.rank + shape.rope) / shape.heads
            return self.gathered * products + self.number * numbers
        return products * (self.absorbed if way == ABSORBED else 1)


# A CPU multiplies as fast in all ways, and moves what is gathered slowly.
ON_CPU = Costs(absorbed=2.0, gathered=1.5, number=40.0)
# From public figures of the same arithmetic on Metal: steps of 2,048 tokens gain from
# about 32k keys on.
ON_GPU = Costs(absorbed=1.0, gathered=7.5, number=40.0)


def best_way(
    shape: Shape, index_topk: int, L: int, T: int, sparse_from: int | None = None
) -> str:
    """The way for L queries of T keys that takes least time, by its costs.

    Parameters
    ----------
    sparse_from : int, optional
        Gather from so many keys on, and not before, whatever the costs.
    """
    ways = WAYS
    if sparse_from is not None:
        if T >= sparse_from:
            return GATHERED
        ways = (UPSTREAM, ABSORBED)
    costs = ON_CPU if mx.default_device() == mx.cpu else ON_GPU
    return min(ways, key=lambda way: costs.of(way, shape, index_topk, L, T))


def keys_after(cache: Any, L: int) -> int | None:
    """Columns that a layer sees in a step of L tokens; ``None`` where we don't know."""
    if cache is None:
        return L
    kinds = {type(cache[0]), type(cache[1])}
    if kinds == {KVCache}:
        return cache[0].offset + L
    return cache[0]._idx + L if kinds == {BatchKVCache} else None


def sparse_forward(
    forward: types.FunctionType,
    attention: nn.Module,
    x: mx.array,
    mask: mx.array | None,
    cache: Any | None,
    way: str,
    memory: int,
) -> mx.array:
    """What a layer's own forward returns, with the same selection.

    The forward projects, rotates and stores as it does. MLX computes nothing of its
    dense attention, since nobody looks at it.

    Parameters
    ----------
    forward : function
        Upstream's ``DeepseekV32Attention.__call__``.
    attention : mlx_lm.models.deepseek_v32.DeepseekV32Attention
        The layer.
    x : mx.array, shape (B, L, hidden_size)
    mask : mx.array of bool, shape (L, T) or (B, 1, L, T), optional
        True where a query sees a column.
    cache : optional
        Those of the layer and of its indexer: ``KVCache`` or ``BatchKVCache``.
    way : str
        ``"absorbed"`` or ``"gathered"``.
    memory : int
        Bytes that a block of queries may take.

    Returns
    -------
    mx.array, shape (B, L, hidden_size)
    """
    step = _Step(attention, way, memory, forward.__globals__[KERNEL])
    caches = _Caches(
        [_Passing(), _Passing()] if cache is None else [cache[0], cache[1]]
    )
    caches.step = step
    return _with_our_kernel(forward)(step, x, mask, caches)


class _Passing:
    """In the place of a cache: it holds one step."""

    offset = 0

    def __init__(self):
        # An indexer without keys of its own leaves them.
        self.keys = self.values = mx.zeros(0)

    def update_and_fetch(self, keys, values):
        self.keys, self.values = keys, values
        return keys, values


class _Caches(list):
    """The caches of a step, which the forward hands on to the kernel."""

    step: _Step


class _Step:
    """A layer as its own forward sees it, in one step; it notes what is computed."""

    def __init__(self, attention: nn.Module, way: str, memory: int, kernel: Any):
        self._attention, self.way, self.memory = attention, way, memory
        self.kernel = kernel
        self.columns = self.mask = self.rotated = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attention, name)

    def indexer(self, x, qr, mask, cache=None):
        columns = self._attention.indexer(x, qr, mask, cache=cache)
        if columns is not None:
            columns = mx.stop_gradient(columns)
        self.columns, self.mask = columns, mask
        return None if self.way == GATHERED else columns

    def rope(self, x, *arguments, **named):
        rotated = self._attention.rope(x, *arguments, **named)
        if self.rotated is None:  # queries come before keys
            self.rotated = rotated
        return rotated


@functools.cache
def _with_our_kernel(forward: types.FunctionType) -> types.FunctionType:
    return with_kernel(forward, _attend)


def _attend(queries, keys, values, cache, scale, mask):
    step = cache.step
    if step.columns is None:  # all columns fit
        return step.kernel(queries, keys, values, cache=cache, scale=scale, mask=mask)
    absorbed = step.embed_q(queries)
    T = mask.shape[-1]
    latents, rope_keys = cache[0].keys[..., :T, :], cache[0].values[..., :T, :]
    if step.way == ABSORBED:  # the mask has the rotary scores, and hides columns
        output = step.kernel(
            absorbed, latents, latents, cache=cache, scale=scale, mask=mask
        )
    else:
        output = gathered_attention(
            absorbed,
            step.rotated,
            latents,
            rope_keys,
            step.columns,
            step.mask,
            scale,
            step.memory,
        )
    return step.unembed_out(output)


def gathered_attention(
    queries: mx.array,
    rotated: mx.array,
    latents: mx.array,
    rope_keys: mx.array,
    columns: mx.array,
    mask: mx.array | None,
    scale: float,
    memory: int,
) -> mx.array:
    """Attention of each query to its own columns; sums and softmax in float32.

    Parameters
    ----------
    queries, rotated : mx.array, shapes (B, H, L, rank) and (B, H, L, rope)
        Absorbed queries, and their rotary part.
    latents, rope_keys : mx.array, shapes (B, 1, T, rank) and (B, 1, T, rope)
    columns : mx.array of int, shape (B, 1, L, k)
        Distinct for each query.
    mask : mx.array of bool, broadcastable to (B, 1, L, T), optional
        A column that it hides gets no weight where a query sees any other.
    scale : float
        Of the logits.
    memory : int
        Bytes that a block of queries may take; it has at least one.

    Returns
    -------
    mx.array, shape (B, H, L, rank)
    """
    B, H, L, rank = queries.shape
    k, rope = columns.shape[-1], rotated.shape[-1]
    # Rows that are gathered, in float32 too; logits, weights; a query and its output.
    size = mx.float32.size * (queries.dtype != mx.float32) + queries.itemsize
    row = B * (k * (rank + rope) * size + H * (3 * k + 2 * rank + rope) * 4)
    step = max(1, min(L, memory // max(row, 1)))
    first = mx.arange(B)[:, None, None]
    if mask is not None:
        mask = mx.broadcast_to(mask, (B, 1, L, latents.shape[2]))

    def block(rows: slice) -> mx.array:
        chosen = columns[:, 0, rows]
        gathered, positions = (
            each[:, 0][first, chosen].astype(mx.float32)
            for each in (latents, rope_keys)
        )
        ours, turned = (
            each[:, :, rows].swapaxes(1, 2).astype(mx.float32) * scale
            for each in (queries, rotated)
        )
        logits = ours @ gathered.swapaxes(-1, -2) + turned @ positions.swapaxes(-1, -2)
        if mask is not None:
            shown = mx.take_along_axis(mask[:, 0, rows], chosen, axis=-1)
            logits = mx.where(shown[:, :, None], logits, mx.finfo(mx.float32).min)
        return (mx.softmax(logits, axis=-1) @ gathered).astype(queries.dtype)

    return by_blocks(L, step, block, axis=1).swapaxes(1, 2)
