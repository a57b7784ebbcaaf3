"""A made-up target of a made-up package: one file, one row, and all else follows."""

import json
import shutil
import sys
from pathlib import Path

import pytest

import mlx_sinks
import small_models
from processes import command, run

HOUSE = Path(mlx_sinks.__file__).parent

# An upstream's module, and the file of a contributor.
PLACES, PATCH = (
    Path(__file__).parent / "made_up" / name
    for name in ("places.py", "made_up_places.py")
)

# The row of a contributor.
ROW = """
        Target(
            "made_up",
            package="made-up",
            module="made_up.places",
            tested=">=1.0,<2.0",
            patch="made_up_places:MadeUpPatch",
        ),
    )
}
"""

ASK = """
import json, mlx_sinks
def targets(act):
    try:
        return [report.target for report in act()]
    except mlx_sinks.PatchError as error:
        return str(error)
def kept():
    try:
        from made_up.places import kept
    except ModuleNotFoundError:
        return None
    return kept([*range(9)], 6)
found = {"before": kept(), "install": targets(mlx_sinks.install), "installed": kept()}
mlx_sinks.uninstall()
found["uninstalled"] = kept()
try:
    with mlx_sinks.patched(targets=["made_up"]) as reports:
        found["patched"] = [report.target for report in reports]
        found["inside"] = kept()
except mlx_sinks.PatchError as error:
    found["patched"] = str(error)
print(json.dumps(found))
"""
USE = "from made_up.places import kept; print(kept([*range(9)], 6))"
STOCK, KEPT = [3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 7, 8]
STATES = {"present": "1.5", "absent": None, "untested": "2.0"}


@pytest.fixture(scope="module", params=STATES)
def state(request):
    return request.param


@pytest.fixture(scope="module")
def path(state, tmp_path_factory):
    """The house with one file and one row more, and the package in this state."""
    house = tmp_path_factory.mktemp("house") / HOUSE.name
    shutil.copytree(HOUSE, house, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PATCH, house / "patches")
    targets = (house / "targets.py").read_text()
    assert targets.endswith("\n    )\n}\n")
    (house / "targets.py").write_text(targets.removesuffix("\n    )\n}\n") + ROW)
    folders = [house.parent]
    if release := STATES[state]:
        packages = tmp_path_factory.mktemp("packages")
        (packages / "made_up").mkdir()
        (packages / "made_up" / "__init__.py").touch()
        shutil.copy(PLACES, packages / "made_up")
        facts = packages / f"made_up-{release}.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text(f"Name: made-up\nVersion: {release}\n")
        folders.append(packages)
    return ":".join(map(str, folders))


def test_in_python(path, state, tmp_path):
    outcome = run(sys.executable, "-c", ASK, cwd=tmp_path, PYTHONPATH=path)
    assert outcome.status == 0, outcome.stderr
    found = json.loads(outcome.stdout)
    stock = None if state == "absent" else STOCK
    assert (found["before"], found["uninstalled"]) == (stock, stock)
    if state != "absent":
        assert "made_up" in found["install"]
        assert found["patched"] == ["made_up"]
        assert found["installed"] == found["inside"] == KEPT
    else:
        assert "dsa" in found["install"]
        assert "made_up" not in found["install"]
        assert "made-up isn't installed" in found["patched"]


@pytest.mark.parametrize("through", [[], ["mlx-sinks", "run"]], ids=["plain", "run"])
def test_by_the_variable(path, state, through, tmp_path):
    argv = [*map(command, through[:1]), *through[1:], sys.executable, "-c", USE]
    on, off = (
        run(*argv, cwd=tmp_path, MLX_SINKS=value, PYTHONPATH=path)
        for value in ("1", "made_up=0")
    )
    if state == "absent":
        assert "ModuleNotFoundError" in on.stderr
        return
    assert (off.status, off.stdout, off.stderr) == (0, f"{STOCK}\n", "")
    assert (on.status, on.stdout) == (0, f"{KEPT}\n")
    assert "keeping 4 sinks of made-up rooms in made_up.places" in on.stderr
    release = f"made-up {STATES[state]}" + " (untested)" * (state == "untested")
    assert f", {release}, " in on.stderr


def test_mlx_lm_runs_whatever_the_other_package_is(path, tmp_path):
    argv = (sys.executable, "-c", "import mlx_lm.models.deepseek_v32")
    outcome = run(*argv, cwd=tmp_path, MLX_SINKS="1", PYTHONPATH=path)
    assert outcome.status == 0, outcome.stderr


def test_the_doctor_and_the_status(path, state, tmp_path):
    folder = small_models.write_llama_folder(tmp_path)
    words = (command("mlx-sinks"), "doctor", folder)
    shown = run(*words, "--all", PYTHONPATH=path, COLUMNS="200")
    asked = run(*words, "--json", PYTHONPATH=path, MLX_SINKS="1")
    assert (shown.status, asked.status) == (0, 0)
    words = (command("mlx-sinks"), "status", "--json")
    status = run(*words, PYTHONPATH=path, MLX_SINKS="1")
    (target,) = (
        each
        for each in json.loads(status.stdout)["targets"]
        if each["name"] == "made_up"
    )
    known = {"absent": ("not installed", "made-up"), "present": ("on", "made-up 1.5")}
    untested = "on", "made-up 2.0 (untested)"
    assert (target["state"], target["release"]) == known.get(state, untested)
    places = {place["target"]: place for place in json.loads(asked.stdout)["places"]}
    place = places["made_up"]
    assert place["installed"] == (state != "absent")
    (row,) = [line for line in shown.stdout.splitlines() if "made_up" in line][:1]
    if state == "absent":
        assert "made-up is not installed" in row and row.count("—") == 2
    else:
        assert (place["cured"], place["on"], place["open"]) == (True, True, False)
        assert "it drops the first token" in row
