"""Every command of the README is run, or as much of it as a test can afford."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

import small_models
from mlx_sinks import SinkPolicy, install
from processes import command, run, serving

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.M | re.S)
COMMANDS = [
    line for kind, block in BLOCKS if kind == "sh" for line in block.splitlines()
]
CHECKPOINT = "spicyneuron/GLM-5.1-MLX-4.5bit"


def commands(*words):
    found = [line for line in COMMANDS if all(word in line for word in words)]
    assert found, f"the README has no command with {words}"
    return found


def shell(line):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return run("sh", "-c", line, cwd=ROOT, limit=600, PATH=path)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return small_models.write_folder(tmp_path_factory.mktemp("glm"), "glm_moe_dsa")


def test_each_command_is_of_a_kind_that_is_tested_below():
    known = ("pip install ", "MLX_SINKS=1 mlx_lm.generate ", "make demo")
    known += ("mlx-sinks run mlx_lm.server ", "python bench/smollm2_dsa/")
    assert [line for line in COMMANDS if not line.startswith(known)] == []


def test_the_variable_before_the_plain_command(checkpoint):
    for line in commands("MLX_SINKS=1 mlx_lm.generate"):
        result = shell(f"{line.replace(CHECKPOINT, str(checkpoint))} --max-tokens 4")
        assert result.status == 0, result.stderr
        assert "mlx-sinks: keeping 4 sinks + 64 recent" in result.stderr


def test_the_server_through_mlx_sinks_run(checkpoint, tmp_path):
    (line,) = commands("mlx-sinks run mlx_lm.server")
    words = shlex.split(line.replace(CHECKPOINT, str(checkpoint)))
    with serving(tmp_path, command(words[0]), *words[1:]) as server:
        status, _ = server.complete(prompt="Why do tides lag?", max_tokens=2)
        (said,) = server.log().ours
    assert status == 200
    assert said.startswith("mlx-sinks: keeping 4 sinks + 64 recent")


def test_the_extras_of_the_installation_exist():
    project = (ROOT / "pyproject.toml").read_text()
    (line,) = commands("pip install")
    for extra in re.findall(r"\[(\w+)\]", line):
        assert re.search(rf"^{extra} = \[", project, re.M)


def test_make_demo():
    result = shell("make --dry-run demo")
    assert result.status == 0, result.stderr
    assert "bench/smollm2_dsa/demo.py" in result.stdout


def test_the_bench(tmp_path):
    folder = "build/smollm2-dsa-256"
    for line in commands("build.py"):
        result = shell(line.replace(folder, str(tmp_path / "model")))
        assert result.status == 0, result.stderr
    for line in commands("perplexity.py"):
        # Everything but the minutes: the options, the folder, the text.
        line = f"{line.replace(folder, str(tmp_path / 'model'))} --tokens 200"
        result = shell(line)
        assert result.status == 1
        assert "--tokens 200 doesn't go past index_topk 256" in result.stderr


def test_python(checkpoint):
    (block,) = (block for kind, block in BLOCKS if kind == "python")
    block = block.replace(CHECKPOINT, str(checkpoint))
    exec(compile(block, "README.md", "exec"), {})


def test_the_line_on_standard_error_is_as_shown():
    shown = re.search(r"^mlx-sinks: keeping .*$", README, re.M).group()
    pattern = (
        r"mlx-sinks: keeping 4 sinks \+ 64 recent in mlx_lm\.models\.deepseek_v32 "
        r"\(mlx-sinks [\d.]+, mlx-lm [\d.]+, mlx [\d.]+\)"
    )
    assert re.fullmatch(pattern, shown)
    (report,) = install()
    assert re.fullmatch(pattern, str(report))


def test_the_settings_of_the_table_are_accepted():
    for setting in re.findall(r'^\| `MLX_SINKS="?([^"`]*)"?`', README, re.M):
        SinkPolicy.from_env({"MLX_SINKS": setting})
