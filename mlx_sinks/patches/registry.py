"""Installing and removing patches: whose request is in force, and what it did."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .._version import __version__
from ..logger import inform
from ..policy import Settings, SinkPolicy, command_with
from ..targets import TARGETS
from ..variable import VARIABLE
from .model_line import ModelLine
from .patch import Patch, PatchError, trying

_patches: dict[str, Patch] = {}


def patch_of(name: str) -> Patch:
    """The patch of a target, whose file is imported when it is first asked for."""
    if name not in _patches:
        target = TARGETS[name]
        file, _, kind = target.patch.partition(":")
        module = importlib.import_module(f".{file}", __package__)
        _patches.setdefault(name, getattr(module, kind)(target))
    return _patches[name]


def installed_targets() -> list[str]:
    """Names of the targets whose package is installed."""
    return [name for name, target in TARGETS.items() if target.installed]


def _patches_of_imported() -> list[Patch]:
    """The patches of all modules that the program has imported, also those off."""
    targets = TARGETS.values()
    return [patch_of(t.name) for t in targets if t.module in sys.modules]


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
        Releases of mlx-sinks, the upstream package and mlx.
    """

    target: str
    module: str
    policy: SinkPolicy
    versions: str

    @property
    def sentence(self) -> str:
        """What the logger says."""
        kept = patch_of(self.target).keeps(self.policy)
        return f"keeping {kept} in {self.module} ({self.versions})"

    def __str__(self):
        return f"mlx-sinks: {self.sentence}"


@dataclass(frozen=True)
class _Request:
    """What one owner asked for; the last policy for a target is in force.

    A request without a policy asks only that the patch be installed: ``apply``'s models
    have policies of their own, and a probe only looks.
    """

    owner: Any
    policy: SinkPolicy | None
    targets: frozenset[str]


_ENVIRONMENT = "environment"
_line = ModelLine(lambda: _patches_of_imported(), lambda: versions("mlx-lm"))
# Whether the variable still counts: ``uninstall`` ends that for the process.
wants_environment = True
_lock = threading.RLock()
_requests: tuple[_Request, ...] = ()


def install(
    policy: SinkPolicy | None = None, targets: Iterable[str] | None = None
) -> list[PatchReport]:
    """Patch upstream in this process, for every model of the kinds reached.

    Idempotent: a second call replaces the policy and adds its targets.

    Parameters
    ----------
    policy : SinkPolicy, optional
        What to keep; by default ``SinkPolicy()``.
    targets : iterable of str, optional
        Names of targets; by default all of those whose package is installed.

    Returns
    -------
    list of PatchReport
        One for each target that the policy asks for.

    Raises
    ------
    PatchError
        A release that isn't supported, code that somebody else has replaced, or an
        upstream that doesn't behave as we expect. Nothing is patched then.
    ValueError
        An unknown target.
    """
    return _ask("install", policy, targets)


def install_from_environment(
    policy: SinkPolicy, targets: Iterable[str]
) -> list[PatchReport]:
    """``install`` that gives way to whatever the program itself asks for.

    What can't be patched is refused where a model or cache would run wrongly, not here:
    the program may want another model.
    """
    wanted = [name for name in targets if patch_of(name).wanted(policy)]
    return _ask(_ENVIRONMENT, policy, wanted, first=True)


def uninstall() -> None:
    """Put upstream's own code back, whoever patched it, and however often.

    It lasts: what the program imports later isn't patched by the variable any more.
    """
    global wants_environment
    with _lock:
        wants_environment = False
        _set_requests(())


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
    with _owner() as owner:
        yield _ask(owner, policy, targets)


def apply(model: Any, policy: SinkPolicy | None = None) -> int:
    """Give one model a policy of its own, which comes before any installed one.

    Works without ``install`` too: other models then keep running upstream's own code.
    A pickled model takes its policy along, but not the patch: the process that loads it
    has to call ``apply`` or ``install`` itself.

    Parameters
    ----------
    model : mlx.nn.Module
        A loaded model.
    policy : SinkPolicy, optional
        What this model keeps; by default ``SinkPolicy()``.

    Returns
    -------
    int
        Number of parts reached, for instance one indexer in each layer.

    Raises
    ------
    ValueError
        The model has no part that a patch reaches.
    PatchError
        As from ``install``.
    """
    check_policy(policy)
    return _give(model, policy or SinkPolicy())


def unapply(model: Any) -> int:
    """Take a model's own policy away: an installed one, if any, is in force again.

    Parameters
    ----------
    model : mlx.nn.Module
        A model that ``apply`` was called with; any other that a patch reaches is left
        as it is.

    Returns
    -------
    int
        Number of parts reached.

    Raises
    ------
    ValueError
        The model has no part that a patch reaches.
    """
    return _give(model, None)


def _give(model: Any, policy: SinkPolicy | None) -> int:
    """Give each part of a model a policy of its own, or take it away."""
    with _lock:
        parts = _parts(model)
        if policy is not None:
            _put(_Request("apply", None, frozenset(parts)))
        for part in (part for found in parts.values() for part in found):
            part.sink_policy = policy
        vars(model).pop("sinks_told", None)  # another line applies now
    return sum(map(len, parts.values()))


@contextmanager
def reached(model: Any) -> Iterator[list[Any]]:
    """Install the patches that reach a model, with no policy, until the block ends.

    Yields
    ------
    list
        The parts reached, for instance one indexer in each layer.

    Raises
    ------
    ValueError
        The model has no part that a patch reaches.
    PatchError
        As from ``install``.
    """
    with _owner() as owner:
        with _lock:
            parts = _parts(model)
            _put(_Request(owner, None, frozenset(parts)))
        yield [part for found in parts.values() for part in found]


def _parts(model: Any) -> dict[str, list[Any]]:
    """What each patch that reaches the model finds in it."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an mlx.nn.Module, not {model!r}")
    parts = {name: found for name in TARGETS if (found := patch_of(name).parts(model))}
    if not parts:
        raise ValueError(
            f"{type(model).__name__} has no layer that mlx-sinks patches "
            f"(known: {', '.join(TARGETS)})"
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
    names = frozenset(installed_targets() if targets is None else targets)
    if unknown := names - TARGETS.keys():
        raise ValueError(
            f"unknown target {', '.join(sorted(map(repr, unknown)))} "
            f"(known: {', '.join(TARGETS)})"
        )
    # Outside our lock: an import waits for other threads, which may wait for us.
    for name in names:
        _import_upstream(patch_of(name))
    with _lock:
        _put(_Request(owner, policy, names), first)
        asked_for = names
        if targets is None:
            asked_for = {name for name in names if patch_of(name).wanted(policy)}
        reports = [
            _report(name, policy)
            for name in sorted(asked_for)
            if not patch_of(name).refused
        ]
    for report in reports:
        say = functools.partial(inform, report.sentence)
        patch_of(report.target).announce(say, _line.tell)
    return reports


def _import_upstream(patch: Patch) -> None:
    try:
        importlib.import_module(patch.target.module)
    except ImportError as error:
        missing = f"{patch.target.package} isn't installed"
        reason = str(error) if patch.target.installed else missing
        raise PatchError(_why({patch: reason})) from None


def _put(request: _Request, first: bool = False) -> None:
    """Add to the owner's earlier request, or put it before or after all others."""
    for number, earlier in enumerate(_requests):
        if earlier.owner == request.owner:
            request = replace(request, targets=request.targets | earlier.targets)
            return _set_requests(
                (*_requests[:number], request, *_requests[number + 1 :])
            )
    _set_requests((request, *_requests) if first else (*_requests, request))


@contextmanager
def _owner() -> Iterator[object]:
    """Somebody whose requests end with the block, whatever others did inside."""
    global _requests
    owner = object()
    try:
        yield owner
    finally:
        with _lock:
            _requests = tuple(r for r in _requests if r.owner is not owner)
            _follow_requests(strict=False)


def _set_requests(requests: tuple[_Request, ...]) -> None:
    """Make these the requests in force, or change nothing at all."""
    global _requests
    previous, _requests = _requests, requests
    try:
        _follow_requests()
    except BaseException:
        _requests = previous
        _follow_requests(strict=False)
        raise


def _follow_requests(strict: bool = True) -> None:
    """Install and uninstall as the requests say; refusals raise where ``strict``.

    What only the environment asks for is refused when it is used.
    """
    refused: dict[Patch, str] = {}
    for name in filter(_patches.get, TARGETS):
        patch = _patches[name]
        asking = [request for request in _requests if name in request.targets]
        policies = [request.policy for request in asking]
        # A request of ``apply`` has no policy for other models.
        policy = next(filter(None, reversed(policies)), None)
        module = sys.modules.get(patch.target.module)
        if module is None:
            continue
        if policies and (policy is None or patch.wanted(policy)):
            if strict and (sentence := patch.out_of_reach(module)):
                raise PatchError(sentence)
            reason = None if patch.is_on(module) else patch.refusal(module)
            if reason is None:
                patch.install(module, policy)
            elif all(request.owner == _ENVIRONMENT for request in asking):
                patch.follow(policy)
                if not patch.guard(module, reason, _refuse):
                    raise PatchError(_refusal_of({**_refusing(), patch: reason}))
            elif strict:
                refused[patch] = reason
            else:
                patch.follow(policy)
        else:
            patch.uninstall(module)
    if refused:
        raise PatchError(f"{_why(refused)}; upstream is left as it is")
    policies = [request.policy for request in _requests]
    _line.follow_policy(next(filter(None, reversed(policies)), None))


def _refuse() -> None:
    """Refuse a model or a cache that the environment wants patched."""
    if not trying.get():
        raise PatchError(_refusal_of(_refusing()))


def _refusing() -> dict[Patch, str]:
    return {p: p.refused for p in _patches.values() if p.stands_guard}


def _refusal_of(refused: dict[Patch, str]) -> str:
    """Why, and how to go on."""
    names = [patch.target.name for patch in refused]
    rest = Settings.from_env().without(names).value()
    return (
        f"{_why(refused)}; go on without {'these' if names[1:] else 'it'} by "
        f'{VARIABLE}="{rest}", or without mlx-sinks: {command_with("0")}'
    )


def _why(refused: dict[Patch, str]) -> str:
    """Why patches can't be installed, all of them."""
    releases = {patch.target.release(): None for patch in refused}
    reasons = (f"{patch.target.name} ({why})" for patch, why in refused.items())
    return f"can't patch {' and '.join(releases)}: {', '.join(reasons)}"


def versions(*packages: str) -> str:
    """The releases that results depend on; by default of all packages that we patch."""
    upstream = {
        target.release(): None
        for target in TARGETS.values()
        if target.installed and (target.package in packages or not packages)
    }
    return ", ".join([f"mlx-sinks {__version__}", *upstream, f"mlx {mx.__version__}"])


def _report(name: str, policy: SinkPolicy) -> PatchReport:
    target = TARGETS[name]
    return PatchReport(name, target.module, policy, versions(target.package))
