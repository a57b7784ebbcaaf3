"""The command ``mlx-sinks``."""

from __future__ import annotations

import argparse
import os
import sys

from . import __version__
from .policy import ACCEPTED, VARIABLE, PolicyError, SinkPolicy


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
        description=f"Runs a command with {VARIABLE} set: as it is in your "
        f"environment, or {VARIABLE}=1. Accepted forms: {ACCEPTED}.",
        usage="mlx-sinks run [--sinks N] [--recency N] COMMAND [ARGUMENT ...]",
    )
    for name in ("sinks", "recency"):
        run.add_argument(f"--{name}", metavar="N", help=f"{name} to keep, in tokens")
    run.add_argument("argv", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    argv = options.argv[1:] if options.argv[:1] == ["--"] else options.argv
    if not argv:
        return _fail("run what? For instance: mlx-sinks run mlx_lm.generate --model …")
    asked = {name: getattr(options, name) for name in ("sinks", "recency")}
    counts = [f"{name}={value}" for name, value in asked.items() if value is not None]
    environment = dict(os.environ)
    try:
        if counts:
            environment[VARIABLE] = ",".join(counts)
        if SinkPolicy.from_env(environment) is None:
            environment[VARIABLE] = "1"
    except PolicyError as error:
        return _fail(str(error))
    try:
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        return _fail(f"can't run {argv[0]}: {error.strerror}", status=127)


def _fail(sentence: str, status: int = 2) -> int:
    print(f"mlx-sinks: {sentence}", file=sys.stderr)
    return status
