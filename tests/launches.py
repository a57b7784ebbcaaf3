"""Several processes of ``mlx.launch`` over loopback."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import several_machines
from processes import LIMIT, command, environment

SCRIPT = Path(several_machines.__file__)
# Ends with the program that holds the pipe's other end, however that one ends.
WATCHED = '{{ cat /dev/fd/{pipe}; kill -KILL 0; }} & exec "$@"'


def free_port(count: int = 1) -> int:
    """The first of so many free ports, below those that systems give out themselves.

    At random, because another worker of the test run looks for some at the same time.
    """
    while True:
        first = random.SystemRandom().randrange(20000, 32000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                probe = stack.enter_context(socket.socket())
                probe.bind(("127.0.0.1", port))
            return first


def run_by_each(value: str, *argv: str | Path) -> list[str | Path]:
    """Arguments of ``mlx.launch`` for a command, with our variable's value."""
    # 0.31's launcher runs files by an interpreter, 0.32's by themselves without one.
    given = ["--backend", "ring", "--python", sys.executable]
    return [*given, "--env", f"MLX_SINKS={value}", "--", *argv]


@contextlib.contextmanager
def launched(
    out: Path, *arguments: str | Path, processes: int = 2
) -> Iterator[subprocess.Popen]:
    """Some processes of one command; none of them outlives the block.

    The launcher gets a standard input that stays open: at its end it would spin.
    """
    words = [command("mlx.launch"), "-n", processes]
    words += ["--starting-port", free_port(processes), *arguments]
    pipe, held = os.pipe()
    with (out / "launcher.log").open("wb") as log:
        process = subprocess.Popen(
            ["sh", "-c", WATCHED.format(pipe=pipe), "sh", *map(str, words)],
            stdin=subprocess.PIPE,
            pass_fds=[pipe],
            stdout=log,
            stderr=log,
            env=environment(),
            # Its processes outlive a launcher that is killed by itself.
            start_new_session=True,
        )
    os.close(pipe)
    try:
        yield process
    finally:
        os.close(held)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()


def said(out: Path) -> str:
    """What the launcher and all processes have written."""
    logs = sorted(out.glob("*.log"))
    return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in logs)


def spread(
    folder: Path,
    parallelism: str,
    prompts: list[list[int]],
    count: int,
    value: str,
    out: Path,
    processes: int = 2,
) -> list[dict]:
    """The ``count`` tokens after each prompt, from each rank of several_machines.py.

    ``value`` is our variable's.
    """
    (out / "prompts.json").write_text(json.dumps(prompts))
    files = [out / f"{rank}.json" for rank in range(processes)]
    words = run_by_each(value, SCRIPT, parallelism, folder, count, out)
    # On Linux mlx compiles what it fuses: two ranks may write the same file at once.
    for _ in range(2):
        with launched(out, *words, processes=processes) as process:
            try:
                process.wait(3 * LIMIT)  # ranks wait busily, and share two cores
            except subprocess.TimeoutExpired:
                pytest.fail(f"hung\n{said(out)}")
        if all(file.exists() for file in files):
            return [json.loads(file.read_text()) for file in files]
        assert "Failed to compile" in said(out), said(out)
    pytest.fail(said(out))
