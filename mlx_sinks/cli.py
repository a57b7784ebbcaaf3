"""The command ``mlx-sinks``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ._version import __version__
from .policy import (
    ACCEPTED,
    PARSERS,
    VARIABLE,
    PolicyError,
    SinkPolicy,
    parse_count,
    switched_off,
)

MODEL = "folder or hub id, as for mlx_lm.generate"
DEFAULT = "(default: %(default)s)"


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
        usage="mlx-sinks run [--sinks N] [--recency N] [--kv-budget N] COMMAND "
        "[ARGUMENT ...]",
    )
    _add_policy(run, "the variable's, or ")
    run.add_argument(
        "--kv-budget",
        metavar="N",
        default=argparse.SUPPRESS,
        help="rows that a prompt's keys and values are compacted to (default: the "
        "variable's, or all)",
    )
    run.add_argument("argv", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    run.set_defaults(function=_run)

    probe = commands.add_parser(
        "probe",
        help="show what a model's indexers select of what attention wants",
        description="Reads a text with a model and looks at the selections of each "
        "layer's indexer: the share of the sinks and of the recency window that they "
        "hold, and the share of dense attention that they cover, with and without the "
        f"guarantee. The model runs as {VARIABLE} says: unset, with upstream's own "
        "selection.",
    )
    add = probe.add_argument
    add("--model", required=True, help=MODEL)
    _add_reading(probe)
    add("--worst", type=_count, default=5, help=f"layers in the table {DEFAULT}")
    _add_policy(probe, "")
    add("--json", action="store_true", help="print JSON, no table")
    add("--out", type=_folder, help="folder for probe.json and probe.png")
    probe.set_defaults(function=_probe)

    doctor = commands.add_parser(
        "doctor",
        help="say what loses sinks here, why, and what helps",
        description="Tries each place of this mlx-lm that is known to lose sinks, and "
        "reads the configuration and the headers of a checkpoint: nothing of its "
        f"weights, unless --probe asks for it. {VARIABLE} counts as it is in your "
        "shell. The exit status is 1 where something is wrong, 2 where it couldn't "
        "look.",
    )
    add = doctor.add_argument
    add("--model", help=MODEL)
    add(
        "--context",
        type=_count,
        metavar="N",
        help="tokens to hold (default: all that the model allows)",
    )
    add("--max-kv-size", type=_count, metavar="N", help="as given to mlx-lm")
    add("--probe", action="store_true", help="load the model and probe its indexers")
    _add_reading(doctor)
    add("--json", action="store_true", help="print JSON, no table")
    add("--out", type=_file, metavar="FILE", help="file for the JSON")
    doctor.set_defaults(function=_doctor)
    options = parser.parse_args(arguments)
    try:
        return options.function(options)
    except PolicyError as error:
        return _fail(str(error))


def _add_reading(parser: argparse.ArgumentParser) -> None:
    """How a probe reads a text."""
    add = parser.add_argument
    add("--text", type=Path, help="file to read instead of Python's own manual")
    add(
        "--tokens",
        type=_count,
        help="how many to read (default: twice the model's index_topk)",
    )
    add(
        "--block",
        type=_count,
        default=256,
        help=f"positions averaged in one figure {DEFAULT}",
    )
    add("--queries", type=_count, default=8, help=f"looked at in each block {DEFAULT}")
    add("--chunk", type=_count, default=256, help=f"tokens a step {DEFAULT}")
    add("--trust-remote-code", action="store_true", help="run the folder's own code")


def _add_policy(parser: argparse.ArgumentParser, otherwise: str) -> None:
    for name, what in (("sinks", "first"), ("recency", "newest")):
        default = getattr(SinkPolicy(), name)
        parser.add_argument(
            f"--{name}",
            metavar="N",
            default=argparse.SUPPRESS,
            help=f"{what} tokens to keep (default: {otherwise}{default})",
        )


def _count(text: str) -> int:
    try:
        if count := parse_count("it", text):
            return count
    except PolicyError:
        pass
    raise argparse.ArgumentTypeError(f"a whole number >= 1, not {text}")


def _folder(text: str) -> Path:
    """A folder that is there, or was made: known before the work, not after it."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from None
    return path


def _file(text: str) -> Path:
    """A file that can be written: known before the work, not after it."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} is no file that can be written")
    return path


def _asked(options: argparse.Namespace) -> dict[str, int]:
    """The counts that were given."""
    names = ("sinks", "recency", "kv_budget")
    given = {name: getattr(options, name) for name in names if name in options}
    return {name: PARSERS[name](name, text) for name, text in given.items()}


def _run(options: argparse.Namespace) -> int:
    argv = options.argv[1:] if options.argv[:1] == ["--"] else options.argv
    if not argv:
        return _fail("run what? For instance: mlx-sinks run mlx_lm.generate --model …")
    environment = dict(os.environ)
    # The start-up hook is in this environment; another one's commands know nothing.
    own_commands = str(Path(sys.executable).parent)
    environment["PATH"] = os.pathsep.join([own_commands, os.environ.get("PATH", "")])
    policy = SinkPolicy.from_env()
    if asked := _asked(options):
        policy = replace(policy or SinkPolicy(), **asked)
        off = [f"{name}=0" for name in switched_off()]
        environment[VARIABLE] = ",".join([*policy.settings(), *off])
    elif policy is None:
        environment[VARIABLE] = "1"
    try:
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        status = 126 if isinstance(error, PermissionError) else 127
        return _fail(f"can't run {argv[0]}: {error.strerror}", status)


def _probe(options: argparse.Namespace) -> int:
    policy = SinkPolicy(**_asked(options))
    _check_reading(options)

    def probe() -> int:
        from .probing.command import run  # mlx and mlx-lm: seconds

        return run(options, policy)

    return _with_sentences(probe, 1)


def _doctor(options: argparse.Namespace) -> int:
    _check_reading(options)
    if options.model is None and (options.probe or options.context):
        return _fail("--probe and --context are about a model: say which, with --model")
    policy, off = SinkPolicy.from_env(), switched_off()
    # This process looks at stock mlx-lm first, whatever the shell's commands do.
    os.environ.pop(VARIABLE, None)

    def doctor() -> int:
        from .doctor.command import run
        from .doctor.diagnosis import Shell

        return run(options, Shell(policy, off))

    return _with_sentences(doctor, 2)


def _check_reading(options: argparse.Namespace) -> None:
    if options.queries > options.block:
        raise PolicyError(
            f"--queries {options.queries} exceeds --block {options.block}"
        )


def _with_sentences(act: Callable[[], int], failed: int) -> int:
    try:
        return act()
    except (OSError, ValueError, RuntimeError) as error:
        return _fail(str(error), failed)
    except KeyboardInterrupt:
        return 130


def _fail(sentence: str, status: int = 2) -> int:
    print(f"mlx-sinks: {sentence}", file=sys.stderr)
    return status
