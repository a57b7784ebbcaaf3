"""DSA models in which layers without an indexer reuse the last one's selection.

This is the IndexShare (arXiv:2603.12201) of GLM-5.2 and later, built on the classes of
``mlx_lm/models/deepseek_v32.py``. Every forward here calls upstream's own, except under
pipeline parallelism, where one stage has to send its selection to the next.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import CacheList
from mlx_lm.models.deepseek_v32 import (
    DeepseekV32DecoderLayer,
    DeepseekV32Model,
    Indexer,
)
from mlx_lm.models.glm_moe_dsa import Model, ModelArgs

from ..logger import warn
from ..variable import VARIABLE
from .schedule import FULL, SHARED, CheckpointError, indexer_schedule

WITHOUT = f'{VARIABLE}="index_share=0" gives every layer an indexer, as upstream does'

# What this thread's last full layer selected: (B, 1, L, k), or None where dense.
_selection: ContextVar[mx.array | None | EllipsisType] = ContextVar(
    "selection", default=...
)


class FullIndexer(Indexer):
    """Upstream's indexer, whose selection the following layers can reuse."""

    extends_upstream = True

    def __call__(self, x, qr, mask, cache=None):
        columns = super().__call__(x, qr, mask, cache=cache)
        if columns is not None:
            columns = mx.stop_gradient(columns)  # as upstream's newest release has it
        _selection.set(columns)
        return columns


class SharedIndexer:
    """The indexer of a shared layer, without weights and keys.

    Parameters
    ----------
    index_topk : int
        Number of columns of the selection that it hands on.
    """

    def __init__(self, index_topk: int):
        self.index_topk = index_topk
        # Whether its layer is in training.
        self.folds = False

    def __call__(self, x, qr, mask, cache=None) -> mx.array | None:
        return None if self.folds and _is_folded(x, mask) else selected()


class SharedLayer(DeepseekV32DecoderLayer):
    """A layer whose cache holds no indexer keys."""

    def __call__(self, x, mask=None, cache=None):
        columns = selected()
        self.self_attn.indexer.folds = self.training
        if columns is not None and self.training and _is_folded(x, mask):
            # Before the forward: a gradient checkpoint repeats that out of turn.
            shown = mx.zeros((*columns.shape[:-1], mask.shape[-1]), mx.bool_)
            mask = mask & mx.put_along_axis(shown, columns, mx.array(True), axis=-1)
        if cache is not None:
            # Upstream's attention also evaluates an indexer's cache: its own stands in.
            cache = cache[0], cache[0]
        return super().__call__(x, mask, cache)


def _is_folded(x: mx.array, mask: mx.array | None) -> bool:
    """Whether a layer in training has the selection in its mask: for several tokens."""
    return x.shape[1] > 1 and mask is not None


def selected() -> mx.array | None:
    """The selection to reuse.

    Raises
    ------
    ValueError
        No full layer has been called before.
    """
    columns = _selection.get()
    if columns is ...:
        raise ValueError(
            "a shared layer was called before any full one: there is no selection to "
            "reuse"
        )
    return columns


class SharingModel(DeepseekV32Model):
    """The layers of a model with a schedule."""

    schedule: tuple[str, ...]

    def __call__(self, x, cache=None):
        _selection.set(...)
        try:
            if self.pipeline_size == 1:
                return super().__call__(x, cache)
            return self._as_a_stage(x, cache)
        finally:
            _selection.set(...)  # else the selection would stay in memory

    def _as_a_stage(self, x: mx.array, cache: Any) -> mx.array:
        """Run one stage of a pipeline; the last rank is the first stage."""
        layers = self.layers[self.start_idx : self.end_idx]
        cache = [None] * len(layers) if cache is None else cache
        h = self.embed_tokens(x)
        own = cache[0] and cache[0][0]
        mask = create_attention_mask(h, own, return_array=True)
        # Stages see the same columns, so each knows whether there is a selection.
        T = 1 + (own.offset if own else 0) if mask is None else mask.shape[-1]
        index_topk = layers[0].self_attn.indexer.index_topk
        selects = T > index_topk

        if self.pipeline_rank < self.pipeline_size - 1:
            room = index_topk * (selects and self.schedule[self.start_idx] == SHARED)
            h, columns = _received(h, room, self.pipeline_rank + 1)
            _selection.set(columns)
        for layer, c in zip(layers, cache):
            h = layer(h, mask, c)
        if self.pipeline_rank > 0:
            reused = selects and self.schedule[self.end_idx] == SHARED
            sent = _sent(h, selected() if reused else None, self.pipeline_rank - 1)
            h = mx.depends(h, sent)
            if cache[-1] is not None:
                # The message must be sent even where nobody evaluates this output.
                cache[-1][0].keys = mx.depends(cache[-1][0].keys, sent)
        return self.norm(mx.distributed.all_gather(h)[: h.shape[0]])


@dataclass
class SharingArgs(ModelArgs):
    """Upstream's arguments, and those by which a configuration says what is shared."""

    indexer_types: list[str] | None = None
    index_topk_pattern: str | list[str] | None = None
    index_topk_freq: int | None = None
    index_skip_topk_offset: int | None = None


class SharingGLM(Model):
    """The model of GLM-5.2 and later; one that shares nothing gets upstream's class.

    Raises
    ------
    CheckpointError
        As from ``indexer_schedule``.
    """

    def __init__(self, args: SharingArgs):
        super().__init__(args)
        try:
            schedule = indexer_schedule(vars(args))
        except CheckpointError as error:
            raise CheckpointError(f"{error} ({WITHOUT})") from None
        if schedule is None:
            if type(self) is SharingGLM:
                self.__class__ = Model
            return
        self.model.__class__ = SharingModel
        self.model.schedule = schedule
        for layer, kind in zip(self.model.layers, schedule):
            indexer = layer.self_attn.indexer
            if kind == FULL:
                indexer.__class__ = FullIndexer
            else:
                layer.self_attn.indexer = SharedIndexer(indexer.index_topk)
                layer.__class__ = SharedLayer

    def make_cache(self):
        return [
            CacheList(cache[0]) if isinstance(layer, SharedLayer) else cache
            for layer, cache in zip(self.layers, super().make_cache())
        ]

    def sanitize(self, weights):
        weights = super().sanitize(weights)
        shares = isinstance(self.model, SharingModel)
        idle = set(filter(self._is_idle, weights)) if shares else ()
        if idle:
            warn(
                f"{len(idle)} weights of indexers in shared layers are left out: such "
                "layers have none, and a converter that knew no sharing made them up",
            )
        return {name: weight for name, weight in weights.items() if name not in idle}

    def _is_idle(self, name: str) -> bool:
        parts = name.split(".")
        return (
            parts[:2] == ["model", "layers"]
            and parts[3:5] == ["self_attn", "indexer"]
            and self.model.schedule[int(parts[2])] == SHARED
        )


def _sent(h: mx.array, columns: mx.array | None, rank: int) -> mx.array:
    """Send hidden states (B, L, D) and a selection (B, 1, L, k) in one message.

    Two messages could arrive in either order.
    """
    message = [h.view(mx.uint8)]
    if columns is not None:
        message.append(columns[:, 0].view(mx.uint8))
    return mx.distributed.send(mx.concatenate(message, axis=-1), rank)


def _received(
    like: mx.array, index_topk: int, rank: int
) -> tuple[mx.array, mx.array | None]:
    """Receive what ``_sent`` sent; where ``index_topk`` is 0, without a selection."""
    B, L, D = like.shape
    size = D * like.itemsize
    width = size + index_topk * mx.uint32.size
    message = mx.distributed.recv((B, L, width), mx.uint8, rank)
    h = message[..., :size].view(like.dtype)
    if not index_topk:
        return h, None
    return h, message[..., size:].view(mx.uint32)[:, None]
