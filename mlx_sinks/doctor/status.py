"""``mlx-sinks status``: is it on here, for what, and what does it reach?"""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib import metadata

import mlx.core as mx
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .._version import __version__
from ..patches.registry import patch_of
from ..policy import PolicyError, Settings
from ..targets import OTHER_RUNTIMES, TARGETS, Target
from ..variable import QUIET_VARIABLE, VARIABLE

HELP = f"{VARIABLE}=1 mlx_lm.generate --model … switches on for one command"


@dataclass(frozen=True)
class TargetState:
    """One target in this shell.

    Parameters
    ----------
    name : str
        As in ``MLX_SINKS="name=0"``.
    release : str
        The package and its release in words; untested ones are called so.
    state : str
        ``"on"``, ``"off"``, ``"refused"``, ``"not installed"``, or ``"waits"`` for one
        that only some policies ask for.
    reason : str, optional
        Why it is refused.
    """

    name: str
    release: str
    state: str
    reason: str | None = None


def run(*, as_json: bool) -> int:
    """Look, and print; return the status, which is always 0."""
    os.environ[QUIET_VARIABLE] = "1"  # trying a patch isn't using it
    errors, value = Console(stderr=True), os.environ.pop(VARIABLE, None)
    problem, settings = None, Settings()
    try:
        settings = Settings.from_env({VARIABLE: value or ""})
    except PolicyError as error:
        problem = str(error)
    with errors.status("Looking …"):
        targets = [_state(target, settings) for target in TARGETS.values()]
        hook = has_hook()
        programs = programs_here()
    result = {
        "mlx-sinks": __version__,
        "mlx": mx.__version__,
        "python": platform.python_version(),
        "device": str(mx.default_device()),
        "environment": sys.prefix,
        "hook": hook,
        "variable": value,
        "problem": problem,
        "policy": settings.policy and str(settings.policy),
        "targets": [asdict(target) for target in targets],
        "programs": programs,
    }
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        _show(result, targets, Console())
    return 0


def _state(target: Target, settings: Settings) -> TargetState:
    if not target.installed:
        return TargetState(target.name, target.package, "not installed")
    patch, reason = patch_of(target.name), None
    try:
        reason = patch.refusal(importlib.import_module(target.module))
    except Exception as error:  # an upstream that can't be imported
        reason = f"{type(error).__name__}: {error}"
    state = "on" if target.name in settings.targets else "off"
    if state == "on" and not patch.wanted(settings.policy):
        state = "waits"
    if reason:
        state = "refused"
    return TargetState(target.name, target.release(), state, reason)


def has_hook() -> bool:
    """Whether a Python of this environment starts with our hook: it is tried."""
    code = "import sys; print('mlx_sinks.activate' in sys.modules)"
    # Not from here: a folder with the sources would hide what is installed.
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, VARIABLE: "1"},
        capture_output=True,
        text=True,
        cwd=sys.prefix,
    )
    return done.stdout.strip() == "True"


def programs_here() -> list[dict[str, object]]:
    """Packages here that run models, and whether those are reached.

    They are found by what they require and by what they carry, not by their names.
    """
    reached = {target.package for target in TARGETS.values()}
    reached_roots = {target.root for target in TARGETS.values()}
    others = {root.replace("_", "-") for root in OTHER_RUNTIMES - reached_roots}
    found = []
    for distribution in metadata.distributions():
        name = distribution.name
        if name == "mlx-sinks":
            continue
        required = {
            re.split(r"[^\w.-]", each, maxsplit=1)[0].lower().replace("_", "-")
            for each in distribution.requires or ()
            if "extra ==" not in each
        }
        copies = {
            str(file.parent.parent)
            for file in distribution.files or ()
            if file.parts[-3:] == ("mlx_lm", "models", "cache.py") != file.parts
        }
        if copies:
            how, is_reached = f"carries a copy of mlx-lm ({min(copies)})", False
        elif name in others:
            how, is_reached = "runs models by code of its own", False
        elif name in reached:
            how, is_reached = "is patched", True
        elif used := required & (others | reached):
            how = f"uses {' and '.join(sorted(used))}"
            # True, False, or None where it depends on the package that a model uses.
            is_reached = None if used & others and used & reached else used <= reached
        else:
            continue
        found.append(
            {
                "name": name,
                "version": distribution.version,
                "reached": is_reached,
                "how": how,
            }
        )
    return sorted(found, key=lambda each: str(each["name"]))


def _show(result: dict, targets: list[TargetState], console: Console) -> None:
    value, hook = result["variable"], result["hook"]
    if result["problem"]:
        first = f"[red]✗[/red] {escape(result['problem'])}"
    elif not hook:
        first = (
            "[red]✗[/red] Python starts without our hook here: no command is patched. "
            "pip install mlx-sinks in this environment puts it there"
        )
    elif result["policy"]:
        first = f"[green]✓[/green] on: {escape(result['policy'])}"
    else:
        said = "is unset" if value is None else f"is {value!r}"
        first = f"• off: {VARIABLE} {escape(said)}. {escape(HELP)}"
    console.print(first, highlight=False)
    for target in targets:
        if target.state == "refused":
            reason = escape(str(target.reason))
            sentence = f"[red]✗[/red] {target.name} is refused: {reason}"
            console.print(sentence, highlight=False)
    console.print()
    table = Table("target", "package", "state")
    for target in targets:
        table.add_row(target.name, escape(target.release), target.state)
    console.print(table)
    table = Table("program here", "release", "reached", "how")
    table.caption = "A program may bring code of its own: each model's line says so."
    for each in result["programs"]:
        reached = {True: "yes", False: "no", None: "in part"}[each["reached"]]
        cells = (each["name"], each["version"], reached, each["how"])
        table.add_row(*map(escape, cells))
    console.print(table)
    about = (
        f"mlx-sinks {result['mlx-sinks']}, mlx {result['mlx']}, Python "
        f"{result['python']}, {result['device']}, in {result['environment']}"
    )
    console.print(about, highlight=False, style="dim")
