"""The command ``mlx-sinks``."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

from . import __version__
from .policy import ACCEPTED, VARIABLE, PolicyError, SinkPolicy, parse_count


def main(arguments: list[str] | None = None) -> int:
    """Run ``mlx-sinks`` and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="mlx-sinks",
        description="Keeps attention sinks alive in MLX language models.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help=f"run a command with {VARIABLE} set",
        description=f"Runs a command of this Python environment, or of the PATH, with "
        f"{VARIABLE} set: as it is in your environment where it is on there, else "
        f"{VARIABLE}=1. Accepted forms: {ACCEPTED}.",
        usage="mlx-sinks run [--sinks N] [--recency N] COMMAND [ARGUMENT ...]",
    )
    for name, what in (("sinks", "first"), ("recency", "newest")):
        default = getattr(SinkPolicy(), name)
        run.add_argument(
            f"--{name}",
            metavar="N",
            help=f"{what} tokens to keep (default: the variable's, or {default})",
        )
    run.add_argument("argv", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return _run(parser.parse_args(arguments))


def _run(options: argparse.Namespace) -> int:
    argv = options.argv[1:] if options.argv[:1] == ["--"] else options.argv
    if not argv:
        return _fail("run what? For instance: mlx-sinks run mlx_lm.generate --model …")
    asked = {name: getattr(options, name) for name in ("sinks", "recency")}
    asked = {name: text for name, text in asked.items() if text is not None}
    environment = dict(os.environ)
    # The start-up hook is in this environment; another one's commands know nothing.
    own_commands = str(Path(sys.executable).parent)
    environment["PATH"] = os.pathsep.join([own_commands, os.environ.get("PATH", "")])
    try:
        policy = SinkPolicy.from_env()
        if asked:
            counts = {name: parse_count(name, text) for name, text in asked.items()}
            policy = replace(policy or SinkPolicy(), **counts)
            environment[VARIABLE] = f"sinks={policy.sinks},recency={policy.recency}"
        elif policy is None:
            environment[VARIABLE] = "1"
        os.execvpe(argv[0], argv, environment)
    except PolicyError as error:
        return _fail(str(error))
    except OSError as error:
        status = 126 if isinstance(error, PermissionError) else 127
        return _fail(f"can't run {argv[0]}: {error.strerror}", status)


def _fail(sentence: str, status: int = 2) -> int:
    print(f"mlx-sinks: {sentence}", file=sys.stderr)
    return status
