"""Every command of README and docs is run, or as much of it as a test can afford."""

import logging
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from mlx_lm.models.cache import make_prompt_cache

import small_models
from lines import heard
from mlx_sinks import SinkPolicy, install
from processes import command, run, serving

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCS = [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", "\n".join([README, *DOCS]), re.M | re.S)
COMMANDS = [
    line
    for kind, block in BLOCKS
    if kind == "sh"
    for line in block.replace("\\\n", " ").splitlines()
]
# What to add to a command that would take minutes, and the sentence that it then ends
# with: everything before that is done, options, model and text included.
AFFORDABLE = {
    "bench/perplexity.py": ("--tokens 9", "9 tokens don't go past"),
    "bench/repetition_profile.py": ("--past 0.1", "tokens don't go past"),
    "bench/failure_zoo.py": ("--tokens 9", "--tokens 9 has to go past"),
    "bench/policy_sweep.py": ("--tokens 9", "--tokens 9 has to go past"),
    "train_indexer.py": ("--length 9999999", "too few for --length"),
    "mlx-sinks probe": ("--tokens 9", "9 tokens don't go past"),
    "bench/rotating_window.py": ("--tokens 9 --skip 0", "9 tokens don't go past"),
    "bench/exactness.py": ("--tokens 9 --skip 9999999", "tokens after 9999999"),
    "bench/sink_positions.py": ("--tokens 9 --skip 0", "9 tokens don't go past"),
    "bench/cache_speed.py": ("--windows 4", "must be smaller than window=4"),
    "bench/indexer_speed.py": ("--keys 9", "no --keys go past"),
    "bench/topk_speed.py": ("--columns 9", "--columns have to go past"),
    "bench/snapkv_budget.py": ("--skip 0 --prompts 9", "of 9 tokens isn't compacted"),
    "bench/attention_speed.py": ("--keys 9", "no step goes past"),
    "bench/next_turn.py": ("--skip 9999999", "tokens after 9999999"),
    "bench/end_to_end.py --model": ("--dtype float32", "--dtype is for --glm-layers"),
    "bench/end_to_end.py --glm": ("--model x", "not allowed with argument"),
}
JARGON = "/usr/share/doc/jargon-text/jargon.txt.gz"
CHECKPOINT = "spicyneuron/GLM-5.1-MLX-4.5bit"
WINDOWED = "mlx-community/Llama-3.2-3B-Instruct-4bit"


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


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    return small_models.write_llama_folder(tmp_path_factory.mktemp("llama"))


def test_each_command_is_of_a_kind_that_is_tested_below():
    known = ("pip install ", "MLX_SINKS=1 mlx_lm.generate ", "make demo", "make speed")
    known += ("mlx-sinks run mlx_lm.server ", "mlx-sinks probe ", "python bench/")
    known += ("mlx-sinks run --kv-budget ",)
    known += ('LD_PRELOAD="" python bench/indexer_speed.py ',)
    known += (
        "mlx-sinks status",
        "mlx-sinks doctor",
        "mlx.launch ",
    )  # tests/end_to_end has the latter
    assert [line for line in COMMANDS if not line.startswith(known)] == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (CHECKPOINT, "mlx-sinks: glm_moe_dsa: keeping 4 sinks + 8 recent among "),
        (WINDOWED, "mlx-sinks: llama: keeping 4 sinks in a window of 1,024 tokens"),
    ],
)
def test_the_variable_before_the_plain_command(checkpoint, windowed, name, said):
    folder = {CHECKPOINT: checkpoint, WINDOWED: windowed}[name]
    for line in commands("MLX_SINKS=1 mlx_lm.generate", name):
        result = shell(f"{line.replace(name, str(folder))} --max-tokens 4")
        assert result.status == 0, result.stderr
        assert said in result.stderr


def test_the_server_through_mlx_sinks_run(checkpoint, tmp_path):
    (line,) = commands("mlx-sinks run mlx_lm.server")
    words = shlex.split(line.replace(CHECKPOINT, str(checkpoint)))
    with serving(tmp_path, command(words[0]), *words[1:]) as server:
        status, _ = server.complete(prompt="Why do tides lag?", max_tokens=2)
        (said,) = server.log().ours
    assert status == 200
    assert " - INFO - mlx-sinks: glm_moe_dsa: keeping 4 sinks + 8 recent" in said


def test_a_budget_through_mlx_sinks_run(windowed, tmp_path):
    first, second = commands("mlx-sinks run --kv-budget")
    line = first.replace(WINDOWED, str(windowed)).replace("notes.txt", "README.md")
    result = shell(f"{line} --max-tokens 2 --ignore-chat-template")
    assert result.status == 0, result.stderr
    assert "keeping 4 sinks of prompts compacted to 1,024 rows" in result.stderr
    words = shlex.split(second.replace(WINDOWED, str(windowed)))
    with serving(tmp_path, command(words[0]), *words[1:]) as server:
        status, _ = server.complete(prompt="Why? " * 300, max_tokens=2)
        (said,) = server.log().ours
    assert status == 200
    assert "mlx-sinks: llama: keeping 4 sinks of prompts compacted to 1,024" in said


def test_the_doctor(checkpoint, windowed):
    for line in commands("mlx-sinks status"):
        assert "off: MLX_SINKS is unset" in shell(line).stdout
    for line in commands("mlx-sinks doctor"):
        named = line.replace(CHECKPOINT, str(checkpoint))
        result = shell(named.replace(WINDOWED, str(windowed)))
        assert (result.status, result.stderr) == (1, "")
        assert ("✗ sinks lost" in result.stdout) == (CHECKPOINT in line)
        assert ("✗ rotating mask" in result.stdout) == (WINDOWED in line)


def test_what_the_doctor_says_is_as_shown(tmp_path):
    (shown,) = re.findall(r"^```\n(✗.*?)^```", README, re.M | re.S)
    facts = small_models.glm52()
    left_out = small_models.shared_layers(facts)
    small_models.write_folder(
        tmp_path / "GLM-5.2-4bit",
        "glm_moe_dsa",
        2048,
        bits=4,
        without=left_out,
        **facts,
    )
    said = shell(f"cd {tmp_path}; mlx-sinks doctor GLM-5.2-4bit").stdout
    lines = [line.rstrip() for line in said.splitlines()]
    assert "\n".join(lines).startswith(shown)


def test_the_extras_of_the_installation_exist():
    project = (ROOT / "pyproject.toml").read_text()
    (line,) = commands("pip install")
    for extra in re.findall(r"\[(\w+)\]", line):
        assert re.search(rf"^{extra} = \[", project, re.M)


@pytest.mark.parametrize(
    ("target", "script"),
    [
        ("demo", "demo.py"),
        ("speed", "indexer_speed.py"),
        ("speed", "attention_speed.py"),
    ],
)
def test_make(target, script):
    assert commands(f"make {target}")
    result = shell(f"make --dry-run {target}")
    assert result.status == 0, result.stderr
    assert f"bench/{script}" in result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folders that the build.py commands write, by the names they write to."""
    folders = {}
    for line in commands("build.py"):
        (out,) = re.findall(r"--out (\S+)", line)
        folders[out] = str(tmp_path_factory.mktemp("built") / Path(out).name)
        result = shell(line.replace(out, folders[out]))
        assert result.status == 0, result.stderr
    return folders


@pytest.mark.newest
@pytest.mark.parametrize(
    "line", [line for line in COMMANDS if any(name in line for name in AFFORDABLE)]
)
def test_what_takes_minutes(line, built, checkpoint, tmp_path):
    folders = {**built, CHECKPOINT: str(checkpoint), JARGON: "README.md"}
    folders["notes.txt"] = "README.md"
    for name in re.findall(r"\S+\.safetensors", line):  # another seed's takes an hour
        folders[name] = "bench/smollm2/trained/seed0.safetensors"
    for name in re.findall(r" (/usr/share/\S+)", line):
        folders[name] = "README.md"
    for name in re.findall(r"--(?:out|parts) (\S+)", line):
        folders[name] = str(tmp_path / Path(name).name)
    words = [folders.get(word, word) for word in line.split()]
    (extra, sentence), *_ = (
        ending for name, ending in AFFORDABLE.items() if name in line
    )
    result = shell(" ".join([*words, extra]))
    status = 2 if result.stderr.startswith("usage: ") else 1
    assert result.status == status, result.stdout
    assert sentence in result.stderr


def test_the_bench_that_takes_seconds():
    for line in commands("probe_cost.py"):
        result = shell(f"{line} --rounds 2 --columns 4096")
        assert result.status == 0, result.stderr
        assert "ratio" in result.stdout
    for line in commands("start_up.py"):
        result = shell(f"{line} --rounds 1")
        assert result.status == 0, result.stderr
        assert "set" in result.stdout
    for line in commands("arithmetic.py"):
        result = shell(line)
        assert result.status == 0, result.stderr
        assert "DeepSeek-V3.2" in result.stdout


def test_python(checkpoint, windowed):
    """One block builds on the one before it."""
    blocks = [block for kind, block in BLOCKS if kind == "python"]
    names = {}
    for block in blocks:
        block = block.replace(CHECKPOINT, str(checkpoint))
        block = block.replace(WINDOWED, str(windowed))
        block = block.replace("* 500", "* 5")  # past the small model's index_topk
        exec(compile(block, "README.md", "exec"), names)
    assert len(names["recording"].blocks) > 0


def test_the_line_on_standard_error_is_as_shown():
    (shown,) = re.findall(r"^mlx-sinks: \w+: keeping .*$", README, re.M)
    install()
    with heard(logging.INFO) as lines:
        make_prompt_cache(small_models.make("glm_moe_dsa", 2048, num_hidden_layers=78))
    (line,) = (line for line in lines if "rotary" not in line)
    releases = r" \(mlx-sinks [\d.]+, mlx-lm [\d.]+, mlx [\d.]+\)"
    assert re.sub(releases, "", line) == re.sub(releases, "", shown)


def test_the_settings_of_the_table_are_accepted():
    for setting in re.findall(r'^\| `MLX_SINKS="?([^"`]*)"?`', README, re.M):
        SinkPolicy.from_env({"MLX_SINKS": setting})
