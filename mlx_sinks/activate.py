"""Switching on by environment variable: ``mlx_sinks.pth`` calls ``start`` at start-up.

Nothing of MLX is imported before the program imports mlx-lm itself.
"""

from __future__ import annotations

import functools
import sys
import threading
from types import ModuleType

import wrapt

from .policy import PolicyError, SinkPolicy


def start() -> None:
    """Watch for mlx-lm; called at interpreter start where ``MLX_SINKS`` is set."""
    wrapt.register_post_import_hook(_on_mlx_lm, "mlx_lm")


def _on_mlx_lm(_: ModuleType) -> None:
    _speak_in_sentences()
    policy = SinkPolicy.from_env()
    if policy is None:
        return
    from .patches.registry import PATCHES, install_from_environment

    for name, patch in PATCHES.items():
        wrapt.register_post_import_hook(
            lambda _, name=name: install_from_environment(policy, name), patch.module
        )


def _speak_in_sentences() -> None:
    """Our own errors end the program with their sentence instead of a traceback."""
    sys.excepthook = functools.partial(_say_ours, sys.excepthook)
    threading.excepthook = functools.partial(_say_ours_of_thread, threading.excepthook)


def _is_ours(kind: type[BaseException]) -> bool:
    from .patches.registry import PatchError

    return issubclass(kind, (PolicyError, PatchError))


def _say_ours(otherwise, kind, error, traceback) -> None:
    if _is_ours(kind):
        print(f"mlx-sinks: {error}", file=sys.stderr)
    else:
        otherwise(kind, error, traceback)


def _say_ours_of_thread(otherwise, args) -> None:
    if _is_ours(args.exc_type):
        print(f"mlx-sinks: {args.exc_value}", file=sys.stderr)
    else:
        otherwise(args)
