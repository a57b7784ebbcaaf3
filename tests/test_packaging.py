"""What a wheel holds, and that its .pth works where it is unpacked."""

import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path

import pytest
import wrapt
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import mlx_sinks
from mlx_sinks.targets import TARGETS
from processes import LIMIT, environment, run

ROOT = Path(__file__).parents[1]
MODULES = {file.relative_to(ROOT).as_posix() for file in ROOT.glob("mlx_sinks/**/*.py")}
OTHER_FILES = ("mlx_sinks.pth", "mlx_sinks/py.typed", "mlx_sinks/__init__.pyi")
DIST_INFO = f"mlx_sinks-{mlx_sinks.__version__}.dist-info"

# No .pth is processed but the one in the folder given first.
UNPACKED = """
import site, sys
wheel, *others = sys.argv[1:]
sys.path[:0] = [wheel, *others]
site.addsitedir(wheel)
import mlx_lm
print("mlx_sinks" in sys.modules)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    offline = environment(PIP_NO_INDEX="1", PIP_DISABLE_PIP_VERSION_CHECK="1")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*pip, "--wheel-dir", str(folder), str(ROOT)],
        env=offline,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def metadata(wheel):
    return Parser().parsestr(wheel.read(f"{DIST_INFO}/METADATA").decode())


def test_the_wheel_holds_every_module_and_nothing_else(wheel):
    files = {name for name in wheel.namelist() if not name.startswith(DIST_INFO)}
    assert files == {*MODULES, *OTHER_FILES}


def test_the_wheel_carries_the_licence_and_the_command(wheel):
    licence = wheel.read(f"{DIST_INFO}/licenses/LICENSE")
    assert licence == (ROOT / "LICENSE").read_bytes()
    scripts = wheel.read(f"{DIST_INFO}/entry_points.txt").decode()
    assert "mlx-sinks = mlx_sinks.cli:main" in scripts


def test_the_wheel_is_pure(wheel):
    assert "Root-Is-Purelib: true" in wheel.read(f"{DIST_INFO}/WHEEL").decode()


def test_the_pth_is_one_line_that_site_executes(wheel):
    (line,) = wheel.read("mlx_sinks.pth").decode("ascii").splitlines()
    assert line.startswith("import ")


def test_versions_agree(metadata):
    assert metadata["Version"] == mlx_sinks.__version__


def test_nothing_stops_an_upgrade_and_what_is_tested_begins_where_pip_does(metadata):
    needs = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    bounds = {need.name: need.specifier for need in needs}
    for specifier in bounds.values():
        assert {part.operator for part in specifier} <= {">="}
    for target in TARGETS.values():
        lowest = [part for part in SpecifierSet(target.tested) if part.operator == ">="]
        assert lowest == [*bounds[target.package]]
        assert f"'{target.package}{target.tested}'" in (ROOT / "Makefile").read_text()


@pytest.fixture
def activate(wheel, tmp_path):
    """Imports mlx-lm where the wheel is unpacked and nothing of the checkout."""
    wheel.extractall(tmp_path / "wheel")
    libraries = Path(wrapt.__file__).parents[1]
    folders = [tmp_path / "wheel", libraries]
    return lambda **variables: run(
        sys.executable, "-S", "-c", UNPACKED, *folders, **variables
    )


def test_the_unpacked_wheel_registers_its_hook(activate):
    outcome = activate(MLX_SINKS="1")
    assert (outcome.status, outcome.stdout, outcome.ours) == (0, "True\n", [])


def test_the_unpacked_wheels_hook_reads_the_variable(activate):
    outcome = activate(MLX_SINKS="sinks=x")
    (line,) = outcome.ours
    assert line.startswith("mlx-sinks: MLX_SINKS=")
    assert (outcome.status, outcome.stdout) == (1, "")


def test_the_unpacked_wheel_sleeps_where_the_variable_is_unset(activate):
    outcome = activate()
    assert (outcome.status, outcome.stdout, outcome.ours) == (0, "False\n", [])


def test_the_running_environment_has_the_pth(wheel):
    files = distribution("mlx-sinks").files
    # At the root: a .pth anywhere below is not looked at.
    (listed,) = [file for file in files if str(file) == "mlx_sinks.pth"]
    assert listed.locate().read_bytes() == wheel.read("mlx_sinks.pth")


@pytest.mark.parametrize("name", mlx_sinks.__all__)
def test_public_names_are_documented(name):
    documentation = getattr(mlx_sinks, name).__doc__
    assert documentation
    # What @dataclass writes where nobody did.
    assert not documentation.startswith(f"{name}(")


def test_public_names_are_listed():
    assert len(set(mlx_sinks.__all__)) == len(mlx_sinks.__all__)
    assert set(mlx_sinks.__all__) <= set(dir(mlx_sinks))
    with pytest.raises(AttributeError, match="no_such_name"):
        mlx_sinks.no_such_name  # noqa: B018
