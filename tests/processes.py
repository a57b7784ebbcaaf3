"""Commands as a user starts them, offline, with no variable of ours but those given."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

from tools.blas import with_fast_blas

# Seconds before a process counts as hung; a whole run takes about two.
LIMIT = 120

WITHOUT_PTH = """
import runpy, sys
sys.path[:] = {path!r}
del sys.argv[0]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    assert "mlx_sinks" not in sys.modules
"""


BENCH = Path(__file__).parents[1] / "bench"


@dataclass(frozen=True)
class Outcome:
    """How a process ended and what it wrote."""

    status: int
    stdout: str
    stderr: str

    @property
    def ours(self) -> list[str]:
        """The lines on stderr that begin with our name."""
        return [line for line in self.stderr.splitlines() if is_ours(line)]

    @property
    def theirs(self) -> str:
        """What else is on stderr."""
        lines = self.stderr.splitlines(keepends=True)
        return "".join(line for line in lines if not is_ours(line))

    def without_figures(self) -> Outcome:
        """The same, with speeds and sizes masked."""
        mask = [re.sub(r"\d+\.\d+", "#", text) for text in (self.stdout, self.stderr)]
        return Outcome(self.status, *mask)


def is_ours(line: str) -> bool:
    """Also where the program's own logging writes time and level before it."""
    return re.search(r"^(\S+ \S+ - [A-Z]+ - )?mlx-sinks\b", line) is not None


def command(name: str) -> str:
    """A console script of the environment that runs the tests."""
    return str(Path(sys.executable).with_name(name))


def environment(**variables: str) -> dict[str, str]:
    """This process's variables without ours, then those given."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("MLX_SINKS")}
    fixed = {"HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1"}
    return {**inherited, **fixed, **variables}


def run(
    *argv: str | Path,
    stdin: str = "",
    cwd: Path | None = None,
    limit: int = LIMIT,
    **variables: str,
) -> Outcome:
    """Run to the end, for instance ``run(command("mlx_lm.generate"), MLX_SINKS="1")``.

    Output is decoded as it is: bytes are equal where the strings are.
    """
    done = subprocess.run(
        [str(word) for word in argv],
        input=stdin.encode(),
        capture_output=True,
        env=environment(**variables),
        cwd=cwd,
        timeout=limit,
    )
    return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())


def generation(
    folder: Path | str, prompt: str, max_tokens: int, *more: object
) -> list[str]:
    """Arguments of ``mlx_lm.generate``."""
    given = ("--model", folder, "--prompt", prompt, "--max-tokens", max_tokens)
    return [*map(str, given), "--ignore-chat-template", *map(str, more)]


def python(code: str, *arguments: str | Path, **variables: str) -> Outcome:
    """Run ``python -c code arguments``."""
    return run(sys.executable, "-c", code, *arguments, **variables)


def python_beside_tests(code: str) -> Outcome:
    """The same, for code that imports from this folder."""
    return python(code, PYTHONPATH=str(Path(__file__).parent))


def run_without_pth(name: str, *arguments: str | Path) -> Outcome:
    """Run a console script in an interpreter that processes no .pth file at all.

    The script and the path are those of ``run``; what ``site`` does is left out.
    """
    shown = python("import json, sys; print(json.dumps(sys.path[1:]))")
    path = [str(Path(sys.executable).parent), *json.loads(shown.stdout)]
    code = WITHOUT_PTH.format(path=path)
    return run(sys.executable, "-S", "-c", code, command(name), *arguments)


def bench(script: str, *arguments: object, **variables: str) -> Outcome:
    """A script as a user starts it; minutes where there is no optimised BLAS."""
    argv = (sys.executable, BENCH / script, *map(str, arguments))
    return run(*argv, limit=1800, **with_fast_blas({**os.environ, **variables}))


def interrupted(
    *argv: str | Path, when: Callable[[], bool], **variables: str
) -> Outcome:
    """Start a command and press Ctrl-C as soon as ``when`` says so."""
    process = subprocess.Popen(
        [str(word) for word in argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(**variables),
        # Under a shell's background job SIGINT is ignored, and so it would be here.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline = time.monotonic() + 5 * LIMIT
        while not when():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    return Outcome(process.returncode, stdout.decode(), stderr.decode())


@dataclass(frozen=True)
class Server:
    """A running ``mlx_lm.server``."""

    port: int
    stderr: Path
    process: subprocess.Popen

    def connection(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)

    def get(self, path: str) -> int:
        """Status of a GET."""
        with contextlib.closing(self.connection()) as connection:
            connection.request("GET", path)
            return connection.getresponse().status

    def wait(self) -> None:
        """Until it answers."""
        deadline = time.monotonic() + LIMIT
        while True:
            try:
                self.get("/health")
                return
            except OSError:
                assert self.process.poll() is None, self.log().stderr
                assert time.monotonic() < deadline, self.log().stderr
                time.sleep(0.05)

    def complete(self, **body) -> tuple[int, dict]:
        """Status and answer of a completion."""
        with self.completion(**body) as response:
            return response.status, json.loads(response.read())

    @contextlib.contextmanager
    def completion(self, **body):
        """A completion's response, to be read as it comes."""
        with contextlib.closing(self.connection()) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body))
            yield connection.getresponse()

    def log(self) -> Outcome:
        return Outcome(0, "", self.stderr.read_text())


@contextlib.contextmanager
def serving(folder: Path, *argv: str | Path, **variables: str) -> Iterator[Server]:
    """A server on a free port, its log in ``folder``, ended with the block.

    ``argv`` is the command up to ``--port``.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "stderr"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [*map(str, argv), "--port", str(port)],
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=environment(**variables),
        )
    try:
        server = Server(port, log, process)
        server.wait()
        yield server
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def serving_model(folder: Path, model: Path | str, *more: str, **variables: str):
    """``serving`` of plain ``mlx_lm.server``, with more options."""
    words = command("mlx_lm.server"), "--model", model, *more
    return serving(folder, *words, **variables)
