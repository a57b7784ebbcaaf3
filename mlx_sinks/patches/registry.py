"""Installing and removing patches: whose wish is in force, and what it did."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from packaging.specifiers import SpecifierSet

from .._version import __version__
from ..policy import OFF, VARIABLE, SinkPolicy
from .mlx_lm_dsa import DSAPatch
from .mlx_lm_fidelity import FidelityPatch
from .mlx_lm_index_share import IndexSharePatch
from .mlx_lm_rotating import RotatingPatch
from .mlx_lm_snapkv import SnapKVPatch
from .patch import PatchError

QUIET_VARIABLE = "MLX_SINKS_QUIET"


class Patch(Protocol):
    """One upstream place that loses sinks, and its cure.

    ``module`` is upstream's, ``supported`` a range of mlx-lm releases.
    """

    name: str
    module: str
    supported: str

    def keeps(self, policy: SinkPolicy) -> str:
        """What a policy keeps at this place, in words."""

    def announce(self, say: Callable[[], None]) -> None:
        """Say what is kept: now, or when it first matters."""

    def wanted(self, policy: SinkPolicy) -> bool:
        """Whether a policy asks for what this patch does."""

    def find(self, model: Any, module: ModuleType) -> list[Any]:
        """The parts of a model that this patch reaches."""

    def is_on(self, module: ModuleType) -> bool:
        """Whether upstream's calls reach this patch: a reload may have undone it."""

    def self_check(self, module: ModuleType, version: str) -> str | None:
        """What differs from this upstream with an empty policy; ``None`` if nothing."""

    def faults(self, module: ModuleType) -> list[str]:
        """What goes wrong at this place now, found by running what is in force."""

    def install(
        self, module: ModuleType, version: str, policy: SinkPolicy | None
    ) -> None:
        """Put the patch in, or give the one that is in another policy."""

    def uninstall(self, module: ModuleType) -> None:
        """Put upstream's own code back; nothing to do is not an error."""


PATCHES: dict[str, Patch] = {
    patch.name: patch
    for patch in (
        DSAPatch(),
        RotatingPatch(),
        IndexSharePatch(),
        FidelityPatch(),
        SnapKVPatch(),
    )
}


@dataclass(frozen=True)
class PatchReport:
    """What was patched, and how. ``str()`` is the line that users see.

    Parameters
    ----------
    target : str
        Name of the patch, as in ``install(targets=[...])``.
    module : str
        The upstream module.
    policy : SinkPolicy
        What is kept.
    versions : str
        Releases of mlx-sinks, mlx-lm and mlx.
    """

    target: str
    module: str
    policy: SinkPolicy
    versions: str

    def __str__(self):
        kept = PATCHES[self.target].keeps(self.policy)
        return f"mlx-sinks: keeping {kept} in {self.module} ({self.versions})"


@dataclass(frozen=True)
class _Wish:
    """What one owner asked for; the last policy for a target is in force.

    A wish without a policy is for the patch alone: ``apply``'s models carry their own,
    and a probe only looks.
    """

    owner: Any
    policy: SinkPolicy | None
    targets: frozenset[str]


_lock = threading.RLock()
_wishes: tuple[_Wish, ...] = ()


def install(
    policy: SinkPolicy | None = None, targets: Iterable[str] | None = None
) -> list[PatchReport]:
    """Patch mlx-lm in this process, for every model of the kinds reached.

    Idempotent: a second call replaces the policy and adds its targets.

    Parameters
    ----------
    policy : SinkPolicy, optional
        What to keep; by default ``SinkPolicy()``.
    targets : iterable of str, optional
        Names of patches; by default all of them.

    Returns
    -------
    list of PatchReport
        One for each target that the policy asks for.

    Raises
    ------
    PatchError
        A release that isn't supported, code replaced by somebody else, or behaviour
        that is not upstream's as we know it. Nothing is patched then.
    ValueError
        An unknown target.
    """
    return _ask("install", policy, targets)


def install_from_environment(
    policy: SinkPolicy, targets: Iterable[str]
) -> list[PatchReport]:
    """``install`` that gives way to whatever the program itself asks for."""
    return _ask("environment", policy, targets, first=True)


def uninstall() -> None:
    """Put upstream's own code back, whoever had patched it, and however often."""
    with _lock:
        _set_wishes(())


@contextmanager
def patched(
    policy: SinkPolicy | None = None, targets: Iterable[str] | None = None
) -> Iterator[list[PatchReport]]:
    """``install`` for a ``with`` block; what was on before is on again after it.

    Blocks nest; the innermost decides. The process is patched, not the thread: where
    blocks of two threads overlap, the one entered last decides for both.

    Yields
    ------
    list of PatchReport
        One for each target.
    """
    owner = object()
    try:
        yield _ask(owner, policy, targets)
    finally:
        _take_back(owner)


def apply(model: Any, policy: SinkPolicy | None) -> int:
    """Give one model a policy of its own, which comes before any installed one.

    Works without ``install`` too: other models then keep running upstream's own code.
    A pickled model takes its policy along, but not the patch: the process that loads it
    has to call ``apply`` or ``install`` itself.

    Parameters
    ----------
    model : mlx.nn.Module
        A loaded model.
    policy : SinkPolicy or None
        What this model keeps; ``None`` takes its own policy away again.

    Returns
    -------
    int
        Number of parts reached, for instance one indexer a layer.

    Raises
    ------
    ValueError
        The model has no part that a patch reaches.
    PatchError
        As from ``install``.
    """
    check_policy(policy)
    with _lock:
        parts = _parts(model)
        if policy is not None:
            _put(_Wish("apply", None, frozenset(parts)))
        for part in (part for found in parts.values() for part in found):
            part.sink_policy = policy
    return sum(map(len, parts.values()))


@contextmanager
def reached(model: Any) -> Iterator[list[Any]]:
    """Have the patches that reach a model in for a block, with nothing to force.

    Yields
    ------
    list
        The parts reached, for instance one indexer a layer.

    Raises
    ------
    ValueError
        The model has no part that a patch reaches.
    PatchError
        As from ``install``.
    """
    owner = object()
    with _lock:
        parts = _parts(model)
        _put(_Wish(owner, None, frozenset(parts)))
    try:
        yield [part for found in parts.values() for part in found]
    finally:
        _take_back(owner)


def _parts(model: Any) -> dict[str, list[Any]]:
    """What each patch that reaches the model finds in it."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an mlx.nn.Module, not {model!r}")
    parts = {
        name: found
        for name, patch in PATCHES.items()
        if (module := sys.modules.get(patch.module))
        and (found := patch.find(model, module))
    }
    if not parts:
        raise ValueError(
            f"{type(model).__name__} has no layer that mlx-sinks patches "
            f"(known: {', '.join(PATCHES)})"
        )
    return parts


def check_policy(policy: Any) -> None:
    if policy is not None and not isinstance(policy, SinkPolicy):
        raise TypeError(f"policy must be a SinkPolicy, not {policy!r}")


def _ask(
    owner: Any,
    policy: SinkPolicy | None,
    targets: Iterable[str] | None,
    first: bool = False,
) -> list[PatchReport]:
    check_policy(policy)
    policy = policy or SinkPolicy()
    names = frozenset(PATCHES if targets is None else targets)
    if unknown := names - PATCHES.keys():
        raise ValueError(
            f"unknown target {', '.join(map(repr, sorted(unknown)))} "
            f"(known: {', '.join(PATCHES)})"
        )
    # Outside our lock: an import waits for other threads, which may wait for us.
    for name in names:
        importlib.import_module(PATCHES[name].module)
    with _lock:
        _put(_Wish(owner, policy, names), first)
        asked_for = names & {*targets_of(policy)} if targets is None else names
        reports = [_report(name, policy) for name in sorted(asked_for)]
    for report in reports:
        PATCHES[report.target].announce(functools.partial(_say, str(report)))
    return reports


def targets_of(policy: SinkPolicy) -> list[str]:
    """Names of the patches that a policy asks for."""
    return [name for name, patch in PATCHES.items() if patch.wanted(policy)]


def _put(wish: _Wish, first: bool = False) -> None:
    """Add a wish to its owner's earlier one, or put it before or after all others."""
    for place, earlier in enumerate(_wishes):
        if earlier.owner == wish.owner:
            wish = replace(wish, targets=wish.targets | earlier.targets)
            return _set_wishes((*_wishes[:place], wish, *_wishes[place + 1 :]))
    _set_wishes((wish, *_wishes) if first else (*_wishes, wish))


def _take_back(owner: Any) -> None:
    with _lock:
        _set_wishes(tuple(wish for wish in _wishes if wish.owner is not owner))


def _set_wishes(wishes: tuple[_Wish, ...]) -> None:
    """Make these the wishes in force, or change nothing at all."""
    global _wishes
    previous, _wishes = _wishes, wishes
    try:
        _follow_wishes()
    except BaseException:
        _wishes = previous
        _follow_wishes()
        raise


def _follow_wishes() -> None:
    for name, patch in PATCHES.items():
        policies = [wish.policy for wish in _wishes if name in wish.targets]
        # A model's own wish has no policy for the others.
        policy = next(filter(None, reversed(policies)), None)
        module = sys.modules.get(patch.module)
        if policies and (policy is None or patch.wanted(policy)):
            version = _mlx_lm_version()
            if not patch.is_on(module):
                _refuse_unknown(patch, module, version)
            patch.install(module, version, policy)
        elif module is not None:
            patch.uninstall(module)


def _refuse_unknown(patch: Patch, module: ModuleType, version: str) -> None:
    if not SpecifierSet(patch.supported).contains(version, prereleases=True):
        reason = f"only mlx-lm {patch.supported} is supported"
    else:
        try:
            reason = patch.self_check(module, version)
        except Exception as error:
            reason = f"its self-check failed with {type(error).__name__}: {error}"
    if reason:
        raise PatchError(
            f"can't patch {patch.module} of mlx-lm {version}: {reason}; upstream is "
            f"left as it is. Install a matching mlx-lm or mlx-sinks, or go on without "
            f'({VARIABLE}="{patch.name}=0")'
        )


def _mlx_lm_version() -> str:
    return sys.modules["mlx_lm"].__version__


def versions() -> str:
    """The releases that what we do depends on."""
    mlx_lm = _mlx_lm_version()
    return f"mlx-sinks {__version__}, mlx-lm {mlx_lm}, mlx {mx.__version__}"


def _report(name: str, policy: SinkPolicy) -> PatchReport:
    return PatchReport(name, PATCHES[name].module, policy, versions())


@functools.cache
def _say(line: str) -> None:
    """Once a process: a block in a loop should not fill the terminal."""
    if os.environ.get(QUIET_VARIABLE, "").strip().lower() in OFF:
        print(line, file=sys.stderr, flush=True)
