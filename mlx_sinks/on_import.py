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

from .logger import warn
from .policy import PolicyError, Settings, SinkPolicy, command_with
from .sparse.schedule import CheckpointError
from .targets import TARGETS, backend_missing
from .variable import VARIABLE


def prepare(root: str) -> None:
    """Have a package's targets patched when their modules are imported.

    A package that runs models by code which no target reaches is only named.
    """
    _say_ours_in_a_sentence()
    settings = Settings.from_env()
    if settings.policy is None:  # the program has set the variable to off
        return
    if root not in {target.root for target in TARGETS.values()}:
        return _say_out_of_reach(root)
    # One hook for each module: where one patch is refused, none is installed.
    targets = collections.defaultdict(list)
    if root == "mlx_lm":  # what loads models and generates says a line for each
        targets |= {"mlx_lm.utils": [], "mlx_lm.generate": []}
    for name in settings.targets:
        if TARGETS[name].root == root:
            targets[TARGETS[name].module].append(name)
    for module, names in targets.items():
        _when_imported(module, functools.partial(_install, settings.policy, names))


def _install(policy: SinkPolicy, names: list[str]) -> None:
    from .patches import registry
    from .patches.patch import PatchError  # imports MLX

    if not registry.wants_environment:
        return
    try:
        registry.install_from_environment(policy, names)
    except (PatchError, PolicyError):
        raise
    except Exception as error:  # an upstream that nobody here has seen
        raise PatchError(
            f"can't patch this upstream ({type(error).__name__}: {error}); go on "
            f"without mlx-sinks: {command_with('0')}"
        ) from error


def _say_out_of_reach(name: str) -> None:
    owner = name.partition(".")[0]
    code = "code of its own" if name == owner else f"its own copy of mlx-lm ({name})"
    warn(
        f"not reached: {owner} runs models with {code}, which keeps no sinks; to be "
        "reached, run them with mlx_lm.generate"
    )


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


def _sentence_of(error: BaseException | None) -> str | None:
    """An error's message, if it is ours and names the variable to change."""
    if sentence := backend_missing(error):
        return sentence
    ours: tuple[type, ...] = (CheckpointError, PolicyError)
    if patch := sys.modules.get("mlx_sinks.patches.patch"):
        ours += (patch.PatchError,)
    return str(error) if isinstance(error, ours) and VARIABLE in str(error) else None


def _say_ours(otherwise, kind, error, traceback) -> None:
    if sentence := _sentence_of(error):
        print(f"mlx-sinks: {sentence}", file=sys.stderr)
    else:
        otherwise(kind, error, traceback)


def _say_ours_of_thread(otherwise, args) -> None:
    sentence = _sentence_of(args.exc_value)
    if not sentence:
        return otherwise(args)
    print(f"mlx-sinks: {sentence}", file=sys.stderr, flush=True)
    # mlx-lm 0.31.3's server would wait for ever for the thread that has just died.
    os._exit(1)
