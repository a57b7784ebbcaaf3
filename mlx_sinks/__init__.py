"""Attention sinks that stay alive in MLX language models.

Names are loaded on first use, so that the start-up hook costs no import of MLX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checkpoint import CheckpointError
    from .eviction.compact_cache import BatchCompactCache, CompactCache
    from .eviction.compaction import CompactPromptCache, compact_prompt_cache
    from .eviction.prompt_cache import make_sink_cache
    from .eviction.sink_cache import BatchSinkCache, SinkCache
    from .eviction.snapkv import SnapKV, snapkv_keep_columns, snapkv_keep_indices
    from .patches.registry import (
        PatchReport,
        apply,
        install,
        patched,
        uninstall,
    )
    from .patches.upstreams import PatchError
    from .policy import PolicyError, SinkPolicy
    from .probing.recorder import ProbeError, Recording, probe

__version__ = "0.1.0"

_HOMES = {
    "BatchCompactCache": "eviction.compact_cache",
    "CompactCache": "eviction.compact_cache",
    "CompactPromptCache": "eviction.compaction",
    "compact_prompt_cache": "eviction.compaction",
    "SnapKV": "eviction.snapkv",
    "snapkv_keep_columns": "eviction.snapkv",
    "snapkv_keep_indices": "eviction.snapkv",
    "CheckpointError": "checkpoint",
    "BatchSinkCache": "eviction.sink_cache",
    "SinkCache": "eviction.sink_cache",
    "SinkPolicy": "policy",
    "PolicyError": "policy",
    "PatchError": "patches.upstreams",
    "PatchReport": "patches.registry",
    "ProbeError": "probing.recorder",
    "Recording": "probing.recorder",
    "apply": "patches.registry",
    "install": "patches.registry",
    "make_sink_cache": "eviction.prompt_cache",
    "patched": "patches.registry",
    "probe": "probing.recorder",
    "uninstall": "patches.registry",
}
__all__ = [
    "BatchCompactCache",
    "BatchSinkCache",
    "CheckpointError",
    "CompactCache",
    "CompactPromptCache",
    "PatchError",
    "PatchReport",
    "PolicyError",
    "ProbeError",
    "Recording",
    "SinkCache",
    "SinkPolicy",
    "SnapKV",
    "apply",
    "compact_prompt_cache",
    "install",
    "make_sink_cache",
    "patched",
    "probe",
    "snapkv_keep_columns",
    "snapkv_keep_indices",
    "uninstall",
]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(f".{_HOMES[name]}", __name__)
    return getattr(home, name)


def __dir__():
    return sorted([*globals(), *_HOMES])
