"""Target ``indexer_fidelity``: the indexer's arithmetic as it was trained.

Upstream file: ``mlx_lm/models/deepseek_v32.py``. mlx-lm 0.31 rotates neighbouring dims
together in every indexer, whatever ``indexer_rope_interleave`` says in a checkpoint's
configuration (DeepSeek-V3.2's indexers rotate by halves). All releases normalise the
indexer's keys with an epsilon of 1e-5; the reference implementation has 1e-6.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..logger import warn
from ..policy import SinkPolicy
from ..sparse.schedule import (
    K_NORM_EPS,
    ROPE_KEY,
    CheckpointError,
    indexer_interleaves,
)
from ..variable import VARIABLE
from .patch import Patch, Reach, Site, Use, present, random_state_kept


class FidelityPatch(Patch):
    """Corrects each indexer as it is built."""

    def sites(self, module: ModuleType) -> Iterator[Site]:
        yield Site(module.Indexer, "__init__", self._init)
        if not reads_convention(module):
            # Builds the arguments of all models, and drops keys that they don't know.
            yield Site(module.BaseModelArgs, "from_dict", self._from_dict)

    def _init(self, policy, upstream, indexer, args):
        upstream(indexer, args)
        indexer.k_norm.eps = K_NORM_EPS
        if not hasattr(args, ROPE_KEY):
            return
        interleaves = _stated(vars(args))
        # Upstream's is whatever config.json says, which may be null or a number.
        if interleaves is None or rotates_neighbours(indexer) is interleaves:
            return
        if hasattr(indexer.rope, "traditional"):
            indexer.rope.traditional = interleaves
            indexer.sinks_rotation_mended = True
            return
        warn(
            f"{ROPE_KEY} is {str(interleaves).lower()} in this checkpoint, and the "
            f"{type(indexer.rope).__name__} of its indexers can't rotate so: they are "
            "left as mlx-lm has them",
        )

    def _from_dict(self, policy, upstream, cls, config):
        args = upstream(cls, config)
        interleaves = _stated(config)
        if interleaves is not None and not hasattr(args, ROPE_KEY):
            setattr(args, ROPE_KEY, interleaves)
        return args

    def guards(self, module: ModuleType, refuse) -> list[Site]:
        """Upstream's ``from_dict`` serves all models: it is left alone."""
        names = ("Model.__init__", "Indexer.__init__")
        return present(module, names, lambda *_, **__: refuse())

    def reach(self, use: Use, policy: SinkPolicy | None) -> Reach | None:
        if policy is None:
            return None
        parts = use.model.modules()
        mended = any(getattr(part, "sinks_rotation_mended", False) for part in parts)
        return Reach(self.keeps(policy)) if mended else None

    def keeps(self, policy: SinkPolicy) -> str:
        return "the checkpoint's rotary embedding of indexers"

    def self_check(self, module: ModuleType) -> str | None:
        with random_state_kept():
            indexer = module.Indexer(module.ModelArgs(**_SMALL))
        for part, fact in (("rope", "traditional"), ("k_norm", "eps")):
            if not hasattr(getattr(indexer, part, None), fact):
                return f"an Indexer's {part} has no {fact}"
        return None

    def faults(self, module: ModuleType) -> list[str]:
        found = {}
        for interleaves in (True, False):
            config = {"model_type": "deepseek_v32", ROPE_KEY: interleaves, **_SMALL}
            with random_state_kept():
                indexer = module.Indexer(module.ModelArgs.from_dict(config))
            if indexer.rope.traditional != interleaves:
                found["rope"] = f"{ROPE_KEY} is ignored"
            if indexer.k_norm.eps != K_NORM_EPS:
                found["eps"] = (
                    f"the epsilon of k_norm isn't {K_NORM_EPS:g} (tiny keys only)"
                )
        return list(found.values())


def rotates_neighbours(indexer: nn.Module) -> bool:
    """Whether neighbouring dims rotate together, not those of two halves.

    The rotary embedding of longrope has no switch that says it: it is tried.
    """
    if hasattr(indexer.rope, "traditional"):
        return indexer.rope.traditional
    first = mx.eye(indexer.rope_head_dim)[None, None, :1]
    return indexer.rope(first, offset=1)[..., 1].item() != 0


def _stated(config: Mapping[str, Any]) -> bool | None:
    try:
        return indexer_interleaves(config)
    except CheckpointError as error:
        without = f'{VARIABLE}="indexer_fidelity=0" leaves it to mlx-lm'
        raise CheckpointError(f"{error} ({without})") from None


def reads_convention(module: ModuleType) -> bool:
    """Whether this release knows ``indexer_rope_interleave`` itself."""
    return ROPE_KEY in {field.name for field in fields(module.ModelArgs)}


_SMALL = dict(hidden_size=8, index_n_heads=2, index_head_dim=8, q_lora_rank=8)
