"""Attention sinks that stay alive in MLX language models.

Names are loaded on first use, so that the start-up hook costs no import of MLX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from .budgets.compact_cache import BatchCompactCache, CompactCache
    from .budgets.compaction import CompactPromptCache, compact_prompt_cache
    from .budgets.snapkv import SnapKV, snapkv_keep_columns, snapkv_keep_indices
    from .patches.patch import PatchError
    from .patches.registry import (
        PatchReport,
        apply,
        install,
        patched,
        uninstall,
    )
    from .policy import PolicyError, SinkPolicy
    from .probing.recorder import ProbeError, Recording, probe
    from .sparse.schedule import CheckpointError
    from .windows.prompt_cache import make_sink_cache
    from .windows.sink_cache import BatchSinkCache, SinkCache

_HOMES = {
    "BatchCompactCache": "budgets.compact_cache",
    "CompactCache": "budgets.compact_cache",
    "CompactPromptCache": "budgets.compaction",
    "compact_prompt_cache": "budgets.compaction",
    "SnapKV": "budgets.snapkv",
    "snapkv_keep_columns": "budgets.snapkv",
    "snapkv_keep_indices": "budgets.snapkv",
    "CheckpointError": "sparse.schedule",
    "BatchSinkCache": "windows.sink_cache",
    "SinkCache": "windows.sink_cache",
    "SinkPolicy": "policy",
    "PolicyError": "policy",
    "PatchError": "patches.patch",
    "PatchReport": "patches.registry",
    "ProbeError": "probing.recorder",
    "Recording": "probing.recorder",
    "apply": "patches.registry",
    "install": "patches.registry",
    "make_sink_cache": "windows.prompt_cache",
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
