"""``mlx-sinks status``: what is on here, and what is reached."""

import json

import mlx_lm
import pytest

import releases
from mlx_sinks import cli
from mlx_sinks.doctor import status
from mlx_sinks.patches.registry import patch_of
from mlx_sinks.targets import TARGETS
from processes import command, run


@pytest.fixture
def asked(monkeypatch, capsys):
    """What the command prints as JSON."""

    def ask(variable=None):
        monkeypatch.delenv("MLX_SINKS", raising=False)
        if variable is not None:
            monkeypatch.setenv("MLX_SINKS", variable)
        capsys.readouterr()
        assert cli.main(["status", "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return ask


def states(result):
    return {target["name"]: target["state"] for target in result["targets"]}


@pytest.mark.parametrize(
    ("variable", "on", "waits"),
    [
        (None, set(), set()),
        ("0", set(), set()),
        ("1", TARGETS.keys() - {"snapkv"}, {"snapkv"}),
        ("kv_budget=64", TARGETS.keys(), set()),
        ("rotating=0", TARGETS.keys() - {"rotating", "snapkv"}, {"snapkv"}),
    ],
)
def test_the_state_of_each_target(asked, variable, on, waits):
    result = asked(variable)
    found = states(result)
    assert {name for name, state in found.items() if state == "on"} == set(on)
    assert {name for name, state in found.items() if state == "waits"} == waits
    assert result["variable"] == variable
    assert (result["policy"] is None) == (variable in (None, "0"))
    for target in result["targets"]:
        assert target["release"] == f"mlx-lm {mlx_lm.__version__}"


def test_a_variable_that_cannot_be_is_named(asked):
    result = asked("sinks=x")
    assert "sinks must be a whole number" in result["problem"]
    assert set(states(result).values()) == {"off"}


def test_untested_and_refused_are_said(asked, monkeypatch):
    releases.pretend(monkeypatch, "mlx-lm", "0.99.0")
    monkeypatch.setattr(patch_of("dsa"), "self_check", lambda module: "it differs")
    result = asked("1")
    assert {t["release"] for t in result["targets"]} == {"mlx-lm 0.99.0 (untested)"}
    assert states(result)["dsa"] == "refused"
    (reason,) = (t["reason"] for t in result["targets"] if t["reason"])
    assert reason == "it differs"


def test_the_hook_is_tried(monkeypatch, asked, capsys):
    assert status.has_hook()
    monkeypatch.setattr(status, "has_hook", lambda: False)
    monkeypatch.setenv("MLX_SINKS", "1")
    assert cli.main(["status"]) == 0
    assert "Python starts without our hook here" in capsys.readouterr().out


@pytest.fixture
def others(tmp_path):
    """Packages of others, by what their metadata say; the path to find them."""

    def package(name, requires=(), files=()):
        folder = tmp_path / f"{name}-1.2.dist-info"
        folder.mkdir()
        lines = [f"Name: {name}", "Version: 1.2"]
        lines += [f"Requires-Dist: {each}" for each in requires]
        (folder / "METADATA").write_text("\n".join(lines) + "\n")
        (folder / "RECORD").write_text("".join(f"{file},,\n" for file in files))

    package("a-server", ["mlx-lm>=0.31", "fastapi"])
    package("a-studio", ["mlx_vlm (>=0.7)"])
    package("both", ["mlx-lm", "mlx-vlm"])
    package("only-an-extra", ['mlx-lm; extra == "lm"'])
    package("carries", files=["carries/_vendor/mlx_lm/models/cache.py"])
    package("an-adapter", files=["adapter/mlx_lm/__init__.py"])
    package("mlx-vlm", files=["mlx_vlm/__init__.py"])
    return str(tmp_path)


def test_programs_by_what_they_require_and_carry(others):
    outcome = run(command("mlx-sinks"), "status", "--json", PYTHONPATH=others)
    assert (outcome.status, outcome.stderr) == (0, "")
    programs = {p["name"]: p for p in json.loads(outcome.stdout)["programs"]}
    reached = {name: program["reached"] for name, program in programs.items()}
    assert reached == {
        "mlx-lm": True,
        "a-server": True,
        "a-studio": False,
        "both": None,
        "carries": False,
        "mlx-vlm": False,
    }
    assert programs["carries"]["how"] == (
        "carries a copy of mlx-lm (carries/_vendor/mlx_lm)"
    )


@pytest.mark.parametrize("words", [["status"], ["doctor"]])
@pytest.mark.parametrize("variable", [{}, {"MLX_SINKS": "1"}])
def test_it_fits_a_terminal_and_ends_with_0(others, words, variable):
    outcome = run(
        command("mlx-sinks"), *words, PYTHONPATH=others, COLUMNS="80", **variable
    )
    assert (outcome.status, outcome.stderr) == (0, "")
    first, *_ = outcome.stdout.splitlines()
    assert first.startswith(
        "✓ on: 4 sinks" if variable else "• off: MLX_SINKS is unset"
    )
    assert max(map(len, outcome.stdout.splitlines())) <= 80
    assert "…" not in outcome.stdout.replace("--model …", "")
