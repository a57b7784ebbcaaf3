"""Upstream's places that lose sinks, found by running them in this installation."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field

from ..patches.patch import PatchError
from ..patches.registry import patch_of, patched, uninstall
from ..policy import Settings, SinkPolicy
from ..targets import TARGETS, Target


@dataclass(frozen=True)
class Place:
    """One upstream place, as it was found in this installation.

    Parameters
    ----------
    target : str
        Name of its patch.
    package : str
        Upstream's distribution.
    module : str
        Upstream's module.
    installed : bool
        Whether the package is installed; where it isn't, nothing else is known.
    faults : list of str
        What goes wrong there in stock upstream; none where it isn't affected.
    cured : bool
        Whether the patch mends it here.
    on : bool
        Whether a command started from this shell has the patch, and a policy that
        leaves it something to keep.
    refused : str, optional
        Why the patch can't be installed here.
    """

    target: str
    package: str
    module: str
    installed: bool = True
    faults: list[str] = field(default_factory=list)
    cured: bool = False
    on: bool = False
    refused: str | None = None

    @property
    def open(self) -> bool:
        """Whether it has faults that no patch mends in this shell."""
        return bool(self.faults) and not (self.on and self.cured)


def examine(settings: Settings) -> list[Place]:
    """Try each place in stock upstream and patched. Leaves nothing patched.

    Parameters
    ----------
    settings : Settings
        What ``MLX_SINKS`` says in this shell.
    """
    return [_examined(target, settings) for target in TARGETS.values()]


def _examined(target: Target, settings: Settings) -> Place:
    where = target.name, target.package, target.module
    if not target.installed:
        return Place(*where, installed=False)
    uninstall()
    patch = patch_of(target.name)
    on = target.name in settings.targets and patch.mends(settings.policy)
    try:
        faults = patch.faults(importlib.import_module(target.module))
    except Exception as error:  # code that nobody here has seen
        faults = [f"it can't be tried ({type(error).__name__}: {error})"]
    try:
        # A policy that asks for every patch.
        with patched(SinkPolicy(kv_budget=64), [target.name]):
            cured = not patch.faults(importlib.import_module(target.module))
    except PatchError as error:
        return Place(*where, faults=faults, on=on, refused=str(error))
    return Place(*where, faults=faults, cured=cured, on=on)
