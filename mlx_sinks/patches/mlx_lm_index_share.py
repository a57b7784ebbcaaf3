"""Target ``index_share``: layers that reuse the last full layer's selection.

Upstream file: ``mlx_lm/models/glm_moe_dsa.py``. It builds an indexer in every layer. In
a checkpoint of GLM-5.2 or later some layers have none: they should reuse the last full
layer's selection. Strict loading fails; any other leaves those indexers random.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..logger import layers
from ..policy import SinkPolicy
from ..sparse.schedule import FULL, SHARED, indexer_schedule
from .patch import Patch, Reach, Site, Use, random_state_kept


class IndexSharePatch(Patch):
    """Replaces the classes of the model and its arguments by ones with a schedule.

    A model that was built with the patch keeps its schedule without it.
    """

    def sites(self, module: ModuleType) -> list[Site]:
        # It imports upstream's module, which may be half imported at an earlier time.
        from ..sparse.index_share import SharingArgs, SharingGLM

        return [
            Site(module, "ModelArgs", SharingArgs),
            Site(module, "Model", SharingGLM),
        ]

    def guards(self, module: ModuleType, refuse: Callable[[], None]) -> list[Site]:
        """A checkpoint is refused where its configuration shares anything."""

        class Guarded(module.ModelArgs):
            @classmethod
            def from_dict(cls, config):
                if indexer_schedule(config) is not None:
                    refuse()
                return super().from_dict(config)

        return [Site(module, "ModelArgs", Guarded)]

    def reach(self, use: Use, policy: SinkPolicy | None) -> Reach | None:
        if policy is None:
            return None
        from ..sparse.index_share import SharedLayer

        shared = sum(isinstance(part, SharedLayer) for part in use.model.modules())
        kept = f"the same in {layers(shared)} that reuse those selections"
        return Reach(kept) if shared else None

    def keeps(self, policy: SinkPolicy) -> str:
        return "full layers' selections for shared ones"

    def self_check(self, module: ModuleType) -> str | None:
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


def _small_models() -> tuple[Callable, Callable]:
    """Our model with a shared layer, and upstream's that is made to share alike."""
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
