"""Two processes of ``mlx.launch`` over loopback: the tokens of one, past index_topk."""

import contextlib
import functools
import re
import shlex
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx_lm
import pytest

import mlx_sinks
import several_machines
import small_models
from launches import free_port, launched, run_by_each, said, spread
from mlx_sinks import SinkPolicy
from processes import Server, command, is_ours

POLICY = SinkPolicy(sinks=4, recency=6)
VALUE = "sinks=4,recency=6"
NEW_TOKENS = 20
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
CHECKPOINT = "spicyneuron/GLM-5.1-MLX-4.5bit"
README = Path(__file__).parents[2] / "README.md"
README_COMMANDS = re.findall(r"^mlx\.launch .*$", README.read_text(), re.M)


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
            return several_machines.tokens(model, PROMPTS, NEW_TOKENS)

    return generate


# One launch a test: workers of a test run share no fixture.
@pytest.mark.parametrize("parallelism", PARALLELISM)
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_processes_generate_the_tokens_of_one(
    folder, by_one, variant, parallelism, tmp_path
):
    expected = by_one(variant)
    assert expected["alone"] == expected["together"]
    ranks = spread(folder(variant), parallelism, PROMPTS, NEW_TOKENS, VALUE, tmp_path)
    assert ranks == [expected, expected]
    for rank in range(2):
        # Beside the ring's own lines about its attempts to connect.
        lines = (tmp_path / f"{rank}.log").read_text().splitlines()
        (line,) = filter(is_ours, lines)
        assert f": keeping {POLICY} among the " in line, said(tmp_path)


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
    path, count = folder("glm_moe_dsa"), NEW_TOKENS

    def generate(policy):
        with mlx_sinks.patched(policy):
            loaded = mlx_lm.load(str(path))
            return [whole(mlx_lm.generate(*loaded, t, max_tokens=count)) for t in TEXTS]

    def complete(text):
        status, answer = server.complete(prompt=text, max_tokens=count, temperature=0)
        assert status == 200, answer
        return whole(answer["choices"][0]["text"])

    expected = generate(POLICY)
    argv = command("mlx_lm.server"), "--model", path, "--pipeline"
    words = run_by_each(VALUE, *argv)
    with serving(tmp_path, *words) as server, ThreadPoolExecutor(2) as pool:
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
        assert any("that reuse those selections" in line for line in lines)
