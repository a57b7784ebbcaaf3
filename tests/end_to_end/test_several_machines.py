"""Two processes of ``mlx.launch`` over loopback: the tokens of one, past index_topk."""

import contextlib
import functools
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx_lm
import pytest

import mlx_sinks
import several_machines
import small_models
from mlx_sinks import SinkPolicy
from processes import LIMIT, Server, command, environment, is_ours

POLICY = SinkPolicy(sinks=4, recency=6)
ON = "MLX_SINKS=sinks=4,recency=6"
# What a checkpoint's config.json says beside small_models.config; an even number of
# layers, because 0.31.3 splits odd ones wrongly.
VARIANTS = {
    "deepseek_v32": dict(kind="deepseek_v32", num_hidden_layers=4),
    "glm_moe_dsa": dict(kind="glm_moe_dsa", num_hidden_layers=4),
    # Where the layers are split the selection has to cross.
    "glm_moe_dsa shared": dict(
        kind="glm_moe_dsa",
        num_hidden_layers=4,
        indexer_types=["full", "shared", "shared", "full"],
    ),
}
PARALLELISM = ("tensor", "pipeline")
# All past index_topk (16), and ragged as a batch.
PROMPTS = [
    small_models.tokens(seed, length) for seed, length in enumerate((58, 41, 47))
]
TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "Pack my box with five dozen jugs of liquor, please.",
]
SCRIPT = Path(several_machines.__file__)
CHECKPOINT = "spicyneuron/GLM-5.1-MLX-4.5bit"
README = SCRIPT.parents[1] / "README.md"
README_COMMANDS = re.findall(r"^mlx\.launch .*$", README.read_text(), re.M)
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


def two_of(*argv: str | Path) -> list[str | Path]:
    """Arguments of ``mlx.launch`` for a script or console script."""
    # 0.31's launcher runs files by an interpreter, 0.32's by themselves without one.
    return ["--backend", "ring", "--python", sys.executable, "--env", ON, "--", *argv]


@contextlib.contextmanager
def launched(out: Path, *arguments: str | Path) -> Iterator[subprocess.Popen]:
    """Two processes of one command; none of them outlives the block.

    The launcher gets a standard input that stays open: at its end it would spin.
    """
    words = [command("mlx.launch"), "-n", 2, "--starting-port", free_port(2)]
    words += arguments
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
    """What the launcher and both processes have written."""
    logs = sorted(out.glob("*.log"))
    return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in logs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a variant, written once."""

    @functools.cache
    def write(variant: str) -> Path:
        facts = VARIANTS[variant]
        without = small_models.shared_layers(facts)
        path = tmp_path_factory.mktemp(variant)
        return small_models.write_folder(path, without=without, **facts)

    return write


def spread(folder: Path, parallelism: str, out: Path) -> list[dict]:
    """What each rank of a launched script generated."""
    (out / "prompts.json").write_text(json.dumps(PROMPTS))
    files = [out / f"{rank}.json" for rank in range(2)]
    # On Linux mlx compiles what it fuses: two ranks may write the same file at once.
    for _ in range(2):
        with launched(out, *two_of(SCRIPT, parallelism, folder, out)) as process:
            try:
                process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                pytest.fail(f"hung\n{said(out)}")
        if all(file.exists() for file in files):
            return [json.loads(file.read_text()) for file in files]
        assert "Failed to compile" in said(out), said(out)
    pytest.fail(said(out))


@pytest.fixture(scope="module")
def by_one(folder):
    """What one process generates by a policy.

    Asked first: two processes that compile the same CPU kernel at once overwrite each
    other's source, so mlx should have them in its cache.
    """

    @functools.cache
    def generate(variant: str, policy: SinkPolicy = POLICY) -> dict:
        with mlx_sinks.patched(policy):
            model, _ = mlx_lm.load(str(folder(variant)))
            return several_machines.tokens(model, PROMPTS)

    return generate


# One launch a test: workers of a test run share no fixture.
@pytest.mark.parametrize("parallelism", PARALLELISM)
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_processes_generate_the_tokens_of_one(
    folder, by_one, variant, parallelism, tmp_path
):
    expected = by_one(variant)
    assert expected["alone"] == expected["together"]
    assert spread(folder(variant), parallelism, tmp_path) == [expected, expected]
    for rank in range(2):
        # Beside the ring's own lines about its attempts to connect.
        lines = (tmp_path / f"{rank}.log").read_text().splitlines()
        said_by_us = "\n".join(filter(is_ours, lines))
        assert said_by_us.startswith(f"mlx-sinks: keeping {POLICY} in "), said(tmp_path)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_tokens_are_the_policys(by_one, variant):
    """Upstream's selection, which is that of a policy that forces nothing, differs."""
    kept, stock = by_one(variant), by_one(variant, SinkPolicy(0, 0))
    for way in kept:
        assert all(a != b for a, b in zip(kept[way], stock[way]))


@contextlib.contextmanager
def serving(out: Path, *arguments: str | Path) -> Iterator[Server]:
    """A server spread over two processes."""
    port = free_port()
    with launched(out, *arguments, "--port", port) as process:
        server = Server(port, out / "launcher.log", process)
        server.wait()
        yield server


def test_the_server_pipelined(folder, tmp_path):
    path, count = folder("glm_moe_dsa"), several_machines.NEW_TOKENS

    def generate(policy):
        with mlx_sinks.patched(policy):
            loaded = mlx_lm.load(str(path))
            return [whole(mlx_lm.generate(*loaded, t, max_tokens=count)) for t in TEXTS]

    def complete(text):
        status, answer = server.complete(prompt=text, max_tokens=count, temperature=0)
        assert status == 200, answer
        return whole(answer["choices"][0]["text"])

    expected = generate(POLICY)
    argv = two_of(command("mlx_lm.server"), "--model", path, "--pipeline")
    with serving(tmp_path, *argv) as server, ThreadPoolExecutor(2) as pool:
        try:
            texts = list(pool.map(complete, TEXTS))
        except OSError as error:
            pytest.fail(f"{error!r}\n{said(tmp_path)}")
    assert texts == expected, said(tmp_path)
    for kept, stock in zip(texts, generate(SinkPolicy(0, 0))):
        assert kept != stock


def whole(text: str) -> str:
    """Without the bytes of an unfinished letter, which 0.31's server leaves out."""
    return text.rstrip("\ufffd")


@pytest.mark.parametrize("line", README_COMMANDS)
def test_the_commands_of_the_readme(folder, line, tmp_path):
    """With two processes here in place of two hosts."""
    line = line.replace("--hostfile hosts.json ", "")
    line = line.replace('"$(command -v mlx_lm.server)"', command("mlx_lm.server"))
    path = shlex.quote(str(folder("glm_moe_dsa shared")))
    line = line.replace(CHECKPOINT, path)
    program, *arguments = shlex.split(line)
    assert program == "mlx.launch"
    with serving(tmp_path, *arguments) as server:
        status, answer = server.complete(prompt=TEXTS[0], max_tokens=4)
        assert status == 200, answer
        lines = filter(is_ours, server.log().stderr.splitlines())
        assert any("selections for shared ones" in line for line in lines)
