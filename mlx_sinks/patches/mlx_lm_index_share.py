"""Target ``index_share``: layers that reuse the last full layer's selection.

Upstream file: ``mlx_lm/models/glm_moe_dsa.py``. It builds an indexer in every layer,
also where a checkpoint of GLM-5.2 or later has none and the layer should reuse what the
last full one selected: strict loading fails, any other runs on random indexers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..policy import SinkPolicy
from ..sparse.schedule import FULL, SHARED
from .patch import random_state_kept


class IndexSharePatch:
    """Replaces the model's class and its arguments' by ones that follow a schedule."""

    name = "index_share"
    module = "mlx_lm.models.glm_moe_dsa"
    supported = ">=0.31.3,<0.33"

    def __init__(self):
        # By the names that both have; upstream's module may be half imported before.
        self._ours: dict[str, type] = {}
        self._upstreams: dict[str, type] = {}

    def keeps(self, policy: SinkPolicy) -> str:
        return "full layers' selections for shared ones"

    def wanted(self, policy: SinkPolicy) -> bool:
        return True

    def announce(self, say: Callable[[], None]) -> None:
        self._ours["Model"].say = staticmethod(say)  # few models share anything

    def find(self, model: nn.Module, module: ModuleType) -> list[nn.Module]:
        return []  # whether a model shares is decided when it is built

    def is_on(self, module: ModuleType) -> bool:
        return bool(self._ours) and all(
            getattr(module, name) is ours for name, ours in self._ours.items()
        )

    def self_check(self, module: ModuleType, version: str) -> str | None:
        for name, ours in _classes().items():
            upstream = getattr(module, name)
            if upstream.__module__ != module.__name__:
                return f"{name} is replaced by a class of {upstream.__module__}"
            if upstream not in ours.__bases__:
                return f"{name} was loaded again after it had been patched"
        with random_state_kept():
            ours, theirs = _small_models()
        for L in (9, 1, 3):
            tokens = mx.arange(L)[None]
            if not mx.allclose(ours(tokens), theirs(tokens), atol=1e-5):
                return "a layer with another's selection differs from upstream's"
        return None

    def faults(self, module: ModuleType) -> list[str]:
        with random_state_kept():
            model = module.Model(module.ModelArgs.from_dict(_small_config()))
        if isinstance(model.layers[1].self_attn.indexer, nn.Module):
            return ["layers marked as shared select with random indexers of their own"]
        return []

    def install(
        self, module: ModuleType, version: str, policy: SinkPolicy | None
    ) -> None:
        if not self.is_on(module):
            self._ours = _classes()
            self._upstreams = {name: getattr(module, name) for name in self._ours}
            for name, ours in self._ours.items():
                setattr(module, name, ours)

    def uninstall(self, module: ModuleType) -> None:
        # Models that were built meanwhile keep to their schedule.
        if self.is_on(module):
            self.announce(lambda: None)
            for name, upstream in self._upstreams.items():
                setattr(module, name, upstream)
            self._ours = {}


def _classes() -> dict[str, type]:
    """Ours by the names that upstream's have."""
    from ..sparse.index_share import (  # builds on upstream's module
        SharingArgs,
        SharingGLM,
    )

    return {"ModelArgs": SharingArgs, "Model": SharingGLM}


def _small_models() -> tuple[Callable, Callable]:
    """Ours with a shared layer between full ones, and upstream's classes made to."""
    from ..sparse.index_share import SharingArgs, SharingGLM

    upstream = SharingGLM.__base__
    args = SharingArgs.from_dict(_small_config())
    ours, theirs = SharingGLM(args), upstream(args)
    theirs.update(ours.parameters())
    for part in (*ours.modules(), *theirs.modules()):
        part.sink_policy = SinkPolicy(0, 0)  # whatever is in force
    first, second, _ = (layer.self_attn for layer in theirs.model.layers)
    selected, select = [], first.indexer

    def keep(*arguments, **named):
        selected.append(select(*arguments, **named))
        return selected[-1]

    def reuse(x, qr, mask, cache):
        cache.update_and_fetch(x[:, None], x[:, None])  # what upstream evaluates
        return selected[-1]

    first.indexer, second.indexer = keep, reuse
    return tuple(
        functools.partial(model, cache=model.make_cache()) for model in (ours, theirs)
    )


def _small_config() -> dict[str, Any]:
    """Three small layers, the one in the middle shared; the rest as upstream has it."""
    from mlx_lm.models.deepseek_v32 import ModelArgs

    args = ModelArgs(
        model_type="glm_moe_dsa",
        vocab_size=16,
        hidden_size=16,
        index_head_dim=8,
        index_n_heads=2,
        index_topk=4,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        qk_nope_head_dim=8,
    )
    rope = {"rope_type": "default", "rope_theta": args.rope_theta}
    schedule = [FULL, SHARED, FULL]
    return {**vars(args), "rope_parameters": rope, "indexer_types": schedule}
