"""Upstream's places that lose sinks, found by what they do in this installation."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from ..patches.registry import PATCHES, PatchError, patched, uninstall
from ..policy import Settings, SinkPolicy
from ..targets import TARGETS


@dataclass(frozen=True)
class Place:
    """One place of upstream's.

    Parameters
    ----------
    target : str
        Name of its patch.
    module : str
        Upstream's module.
    faults : list of str
        What goes wrong there in stock mlx-lm; none where it isn't affected.
    cured : bool
        Whether the patch mends it here.
    on : bool
        Whether a command started from this shell has the patch.
    refused : str, optional
        Why the patch can't be installed here.
    package : str
        Upstream's distribution.
    installed : bool
        Whether it is installed; nothing was tried where it isn't.
    """

    target: str
    module: str
    faults: list[str]
    cured: bool
    on: bool
    refused: str | None = None
    package: str = ""
    installed: bool = True

    @property
    def open(self) -> bool:
        """Affected, and left so."""
        return bool(self.faults) and not (self.on and self.cured)


def examine(settings: Settings) -> list[Place]:
    """Try each place in stock mlx-lm and patched. Leaves nothing patched."""
    places = []
    for name, patch in PATCHES.items():
        uninstall()
        module = importlib.import_module(patch.module)
        faults, refused = patch.faults(module), None
        try:
            # A policy that asks for every patch.
            with patched(SinkPolicy(kv_budget=1), [name]):
                cured = not patch.faults(module)
        except PatchError as error:
            cured, refused = False, str(error)
        on = name in settings.targets and _mends(name, settings.policy)
        package = TARGETS[name].package
        places.append(Place(name, patch.module, faults, cured, on, refused, package))
    return places


def _mends(target: str, policy: SinkPolicy) -> bool:
    """Whether a policy has something to keep there."""
    if target in ("dsa", "rotating"):
        return policy.sinks > 0
    return target != "snapkv" or policy.kv_budget is not None
