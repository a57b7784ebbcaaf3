"""What ``MLX_SINKS`` does when a program imports an upstream package.

This imports no MLX before the program itself imports a module that is patched.
"""

from __future__ import annotations

import collections
import functools
import os
import sys
import threading
from collections.abc import Callable

import wrapt

from .policy import PolicyError, Settings, SinkPolicy
from .sparse.schedule import CheckpointError
from .targets import TARGETS
from .variable import VARIABLE


def prepare(root: str) -> None:
    """Have a package's targets patched when their modules are imported."""
    _say_ours_in_a_sentence()
    settings = Settings.from_env()
    # One hook for each module: where one patch is refused, none is installed.
    targets = collections.defaultdict(list)
    for name in settings.targets:  # none if the program has set the variable to off
        if TARGETS[name].root == root:
            targets[TARGETS[name].module].append(name)
    for module, names in targets.items():
        _when_imported(module, functools.partial(_install, settings.policy, names))


def _install(policy: SinkPolicy, names: list[str]) -> None:
    from .patches.registry import install_from_environment  # imports MLX

    install_from_environment(policy, names)


@functools.cache
def _say_ours_in_a_sentence() -> None:
    sys.excepthook = functools.partial(_say_ours, sys.excepthook)
    threading.excepthook = functools.partial(_say_ours_of_thread, threading.excepthook)


def _when_imported(name: str, act: Callable[[], object]) -> None:
    """Call ``act`` after each import of a module until ``act`` succeeds.

    Where ``act`` fails, the import fails. The next import calls ``act`` again, so that
    the module never runs unpatched.
    """

    def hook(_):
        try:
            act()
        except BaseException:
            sys.modules.pop(name, None)
            _when_imported(name, act)
            raise

    wrapt.register_post_import_hook(hook, name)


def _is_about_the_environment(error: BaseException | None) -> bool:
    """Whether an error is ours and its message names the variable to change."""
    from .patches.patch import PatchError  # imports MLX

    ours = (CheckpointError, PatchError, PolicyError)
    return isinstance(error, ours) and VARIABLE in str(error)


def _say_ours(otherwise, kind, error, traceback) -> None:
    if _is_about_the_environment(error):
        print(f"mlx-sinks: {error}", file=sys.stderr)
    else:
        otherwise(kind, error, traceback)


def _say_ours_of_thread(otherwise, args) -> None:
    if not _is_about_the_environment(args.exc_value):
        return otherwise(args)
    print(f"mlx-sinks: {args.exc_value}", file=sys.stderr, flush=True)
    # mlx-lm 0.31.3's server would wait for ever for the thread that has just died.
    os._exit(1)
