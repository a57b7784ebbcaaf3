"""The command ``mlx-sinks``: one function a subcommand, in the order of ``COMMANDS``.

Each adds a parser and sets the function that runs it. Options stay in this file.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ._version import __version__
from .logger import warn
from .policy import (
    ACCEPTED,
    PARSERS,
    RECENCY,
    VARIABLE,
    PolicyError,
    Settings,
    SinkPolicy,
    parse_count,
)
from .probing.reading import Reading
from .targets import backend_missing

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
    for add in COMMANDS:
        add(commands)
    options = parser.parse_args(arguments)
    try:
        return options.function(options)
    except PolicyError as error:
        return _fail(str(error))


def _add_run(commands: Any) -> None:
    parser = commands.add_parser(
        "run",
        help=f"run a command with {VARIABLE} set",
        description=f"Runs a command of this Python environment, or of the PATH, with "
        f"{VARIABLE} set. Your environment's value is kept where it is on; else it is "
        f"1. Accepted forms: {ACCEPTED}.",
        usage="mlx-sinks run [--sinks N] [--recency N] [--kv-budget N] COMMAND "
        "[ARGUMENT ...]",
        epilog="Example: mlx-sinks run mlx_lm.generate --model MODEL --prompt Hello",
    )
    _add_policy(parser, "the variable's, or ")
    parser.add_argument(
        "--kv-budget",
        metavar="N",
        default=argparse.SUPPRESS,
        help="rows that each key-value head keeps of a prompt (default: the "
        "variable's, or all)",
    )
    parser.add_argument("argv", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    def run(options: argparse.Namespace) -> int:
        argv = options.argv[1:] if options.argv[:1] == ["--"] else options.argv
        if not argv or not argv[0]:
            return _fail(
                "run what? For instance: mlx-sinks run mlx_lm.generate --model …"
            )
        settings = Settings.from_env()
        policy = replace(settings.policy or SinkPolicy(), **_asked(options))
        environment = {**os.environ, VARIABLE: replace(settings, policy=policy).value()}
        # This environment has the start-up hook: its commands come first.
        own_commands = str(Path(sys.executable).parent)
        path = os.pathsep.join([own_commands, os.environ.get("PATH", "")])
        interpreter = _other_interpreter(shutil.which(argv[0], path=path))
        if interpreter:
            warn(
                f"{argv[0]} runs in another Python environment ({interpreter}): it is "
                "reached only if mlx-sinks is installed there"
            )
        try:
            os.execvpe(argv[0], argv, {**environment, "PATH": path})
        except OSError as error:
            status = 126 if isinstance(error, PermissionError) else 127
            return _fail(f"can't run {argv[0]}: {error.strerror}", status)

    parser.set_defaults(function=run)


def _add_probe(commands: Any) -> None:
    parser = commands.add_parser(
        "probe",
        help="show how much of dense attention a model's indexers select",
        description="Reads a text with a model and looks at the selections of each "
        "layer's indexer: the share of the sinks and of the recency window that they "
        "keep, and the share of dense attention that they cover, with and without the "
        f"guarantee. The model selects as {VARIABLE} says; where that is unset, by "
        "upstream's own code.",
        epilog="Example: mlx-sinks probe --model MODEL --text notes.txt --out probe",
    )
    add = parser.add_argument
    add("--model", help=MODEL)
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the picture of an earlier run's probe.json again, beside it",
    )
    _add_reading(parser)
    add("--worst", type=_count, default=5, help=f"layers in the table {DEFAULT}")
    _add_policy(parser, "")
    add("--json", action="store_true", help="print JSON instead of a table")
    add("--out", type=_folder, help="folder for probe.json and probe.png")

    def run(options: argparse.Namespace) -> int:
        if (options.model is None) == (options.plot is None):
            return _fail("probe what? Name a model with --model, or a file with --plot")
        if options.plot:
            return _start("probing", 1, options.plot, function="plot")
        policy, reading = SinkPolicy(**_asked(options)), _reading(options)
        return _start(
            "probing",
            1,
            reading,
            policy,
            worst=options.worst,
            as_json=options.json,
            out=options.out,
        )

    parser.set_defaults(function=run)


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say whether a model loses sinks here, why, and what helps",
        description="Builds a model's classes from its configuration, reads the "
        "headers of its files, and tries each place of this mlx-lm that is known to "
        "lose sinks. Only --probe loads weights. The verdicts hold for "
        f"{VARIABLE} as your shell sets it. Without a model it is mlx-sinks status. "
        "The exit status is 1 where something is wrong, 2 where the doctor couldn't "
        "look, 3 where it doesn't know the model.",
        usage="mlx-sinks doctor [OPTION ...] [MODEL]",
        epilog="Example: mlx-sinks doctor MODEL --context 8000",
    )
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help=MODEL)
    add("--model", dest="named", metavar="MODEL", help="the same, as mlx-lm has it")
    add(
        "--context",
        type=_count,
        metavar="N",
        help="tokens to hold (default: all that the model allows)",
    )
    add("--max-kv-size", type=_count, metavar="N", help="as given to mlx-lm")
    add("--probe", action="store_true", help="load the model and probe its indexers")
    add("--all", action="store_true", help="show all places known to lose sinks")
    _add_reading(parser)
    add("--json", action="store_true", help="print JSON instead of a table")
    add("--out", type=_folder, help="folder for doctor.json")

    def run(options: argparse.Namespace) -> int:
        if options.model and options.named:
            return _fail(f"which model, {options.model} or {options.named}?")
        options.model = options.model or options.named
        reading = _reading(options)
        if options.model is None:
            for name in ("probe", "context", "max_kv_size", "all", "out"):
                if getattr(options, name):
                    option = f"--{name.replace('_', '-')}"
                    return _fail(f"{option} needs a model: mlx-sinks doctor MODEL")
            return _start("doctor", 2, as_json=options.json, file="status")
        settings = Settings.from_env()
        # This process looks at stock mlx-lm first, whatever the shell's commands do.
        os.environ.pop(VARIABLE, None)
        return _start(
            "doctor",
            2,
            settings,
            model=options.model,
            context=options.context,
            max_kv_size=options.max_kv_size,
            reading=reading if options.probe else None,
            all_places=options.all,
            as_json=options.json,
            out=options.out,
        )

    parser.set_defaults(function=run)


def _add_status(commands: Any) -> None:
    parser = commands.add_parser(
        "status",
        help="say whether mlx-sinks is on here, for what, and what it reaches",
        description=f"Says whether Python starts with our hook in this environment, "
        f"what {VARIABLE} says, which targets are on at which releases, and which "
        "packages here are reached. The exit status is 0.",
        epilog="Example: mlx-sinks status --json",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")

    def run(options: argparse.Namespace) -> int:
        return _start("doctor", 2, as_json=options.json, file="status")

    parser.set_defaults(function=run)


COMMANDS = (_add_run, _add_status, _add_doctor, _add_probe)


def _add_reading(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how a probe reads a text."""
    add = parser.add_argument
    add("--text", type=Path, help="file to read instead of Python's own manual")
    add(
        "--tokens",
        type=_count,
        help="tokens to read (default: twice the model's index_topk)",
    )
    for name, what in (
        ("block", "positions averaged in one figure"),
        ("queries", "queries looked at in each block"),
        ("chunk", "tokens of a prefill step"),
    ):
        default = getattr(Reading, name)
        add(f"--{name}", type=_count, default=default, help=f"{what} {DEFAULT}")
    add("--trust-remote-code", action="store_true", help="run the folder's own code")


def _reading(options: argparse.Namespace) -> Reading:
    """What the options of ``_add_reading`` ask for."""
    names = [field.name for field in fields(Reading)]
    return Reading(**{name: getattr(options, name) for name in names})


def _add_policy(parser: argparse.ArgumentParser, otherwise: str) -> None:
    for name, what, default in (
        ("sinks", "first", SinkPolicy.sinks),
        ("recency", "newest", f"{RECENCY}, at most half of index_topk"),
    ):
        parser.add_argument(
            f"--{name}",
            metavar="N",
            default=argparse.SUPPRESS,
            help=f"{what} tokens to keep (default: {otherwise}{default})",
        )


def _asked(options: argparse.Namespace) -> dict[str, int]:
    """The counts that were given."""
    names = ("sinks", "recency", "kv_budget")
    given = {name: getattr(options, name) for name in names if name in options}
    return {name: PARSERS[name](name, text) for name, text in given.items()}


def _count(text: str) -> int:
    try:
        if count := parse_count("it", text):
            return count
    except PolicyError:
        pass
    raise argparse.ArgumentTypeError(f"a whole number >= 1, not {text}")


def _folder(text: str) -> Path:
    """A folder that can be written in. It is made before the work starts."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} is no folder that can be written in")
    return path


def _start(
    room: str,
    failed: int,
    *arguments: Any,
    file: str = "command",
    function: str = "run",
    **named: Any,
) -> int:
    """Run a subpackage's command; its imports take seconds. Errors become sentences."""
    try:
        command = importlib.import_module(f".{room}.{file}", __package__)
        return getattr(command, function)(*arguments, **named)
    except (OSError, ValueError, RuntimeError) as error:
        return _fail(str(error), failed)
    except ImportError as error:
        if sentence := backend_missing(error):
            return _fail(sentence, failed)
        raise
    except KeyboardInterrupt:
        return 130


def _other_interpreter(command: str | None) -> str | None:
    """The Python that a command is, or that a script names, if it isn't ours."""
    named = command or ""
    if not os.path.basename(named).startswith("python"):
        try:
            with open(command or os.devnull, "rb") as file:
                lines = file.read(500).decode("latin-1").splitlines()[:2]
        except OSError:
            return None
        if not lines or not lines[0].startswith("#!"):  # a program that is no script
            return None
        # Where a path is long, pip writes a shell's line first, then Python's.
        words = " ".join(lines).removeprefix("#!").split()
        pythons = (w for w in words if os.path.basename(w).startswith("python"))
        named = next(pythons, "")
    theirs, ours = map(os.path.realpath, map(os.path.dirname, (named, sys.executable)))
    return named if os.path.isabs(named) and theirs != ours else None


def _fail(sentence: str, status: int = 2) -> int:
    print(f"mlx-sinks: {sentence}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
