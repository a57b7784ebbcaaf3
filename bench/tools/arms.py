"""The same weights three ways in one process: stock, with the guarantee, dense."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import RotatingKVCache
from mlx_lm.models.deepseek_v32 import Indexer
from mlx_lm.tokenizer_utils import TokenizerWrapper

import mlx_sinks
from mlx_sinks.upstream.loading import load_model

ARMS = ("stock", "sinks", "dense")


def load(path: str) -> tuple[nn.Module, TokenizerWrapper]:
    """A model with indexers, as upstream runs it whatever ``MLX_SINKS`` says.

    Raises
    ------
    OSError, ValueError
        It can't be loaded, or has no indexer that could be switched off.
    """
    model, tokenizer = load_any(path)
    if not indexers(model):
        kind = type(model).__module__.rpartition(".")[2]
        raise ValueError(
            f"{path} is a {kind} model without an indexer: its arms would be the same"
        )
    return model, tokenizer


def load_any(path: str) -> tuple[nn.Module, TokenizerWrapper]:
    """The same of a model of any kind; one whose layers share is built so."""
    mlx_sinks.uninstall()
    with mlx_sinks.patched(targets=["index_share"]):
        model, tokenizer = load_model(path)
    mlx_sinks.uninstall()  # what upstream imported meanwhile
    fast_for_reference_blas(model)
    return model, tokenizer


def rotating_cache(model: nn.Module, window: int, sinks: int) -> list[RotatingKVCache]:
    """What ``--max-kv-size`` stands for in stock mlx-lm."""
    return [RotatingKVCache(window, keep=sinks) for _ in model.layers]


def indexers(model: nn.Module) -> list[nn.Module]:
    """The learned top-k of each layer that has one."""
    return [part for part in model.modules() if isinstance(part, Indexer)]


def arms(
    model: nn.Module, policy: mlx_sinks.SinkPolicy
) -> dict[str, Callable[[], AbstractContextManager]]:
    """What to run the model in, for each of ``ARMS``."""
    return {
        "stock": nullcontext,
        "sinks": lambda: mlx_sinks.patched(policy),
        "dense": lambda: dense(model),
    }


@contextmanager
def dense(model: nn.Module) -> Iterator[None]:
    """The model with its indexers off: every column fits."""
    parts = indexers(model)
    before = [indexer.index_topk for indexer in parts]
    for indexer in parts:
        indexer.index_topk = sys.maxsize
    try:
        yield
    finally:
        for indexer, index_topk in zip(parts, before):
            indexer.index_topk = index_topk


def fast_for_reference_blas(model: nn.Module) -> None:
    """Weights stored input-major, equal in value: the CPU wheel multiplies them faster.

    Its reference BLAS runs ``x @ weight.T`` at half the speed on rows of outputs. On
    another device the model stays as it is.
    """
    if mx.default_device() != mx.Device(mx.cpu):
        return
    for part in model.modules():
        if isinstance(part, (nn.Linear, nn.Embedding)):
            part.weight = mx.contiguous(part.weight.T).T
    mx.eval(model.parameters())
