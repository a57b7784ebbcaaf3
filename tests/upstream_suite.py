"""mlx-lm's own tests, without mlx-sinks and with it: what passed has to pass.

    python tests/upstream_suite.py --build build/upstream

Takes the tests from the source distribution of the installed mlx-lm and runs them
against the installed one, offline, from the same random numbers both ways. The hub
model that most of them load is a small random one of its kind; tests of other hub
models, and those that need Metal, fail both ways. Ends with status 1 if a test that
passes off doesn't pass on. Reports and logs are beside the tests.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any
from xml.etree import ElementTree

import mlx.core as mx
from mlx_lm.models import qwen2
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import processes
import small_models
from tools.arguments import folder
from tools.blas import with_fast_blas
from tools.output import environment, new_table
from tools.script import Script, run

ARMS = {"off": {}, "on": {"MLX_SINKS": "1", "MLX_SINKS_QUIET": "1"}}
# From best to worst; subtests share the name of their test.
OUTCOMES = ("passed", "skipped", "failed")
WANTS_HUB = re.compile(r"LocalEntryNotFound|OfflineMode|couldn't connect to")
CONFTEST = """
import random, sys
import mlx.core as mx, numpy as np, pytest

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    for module in (random, np.random, mx.random):
        module.seed(0)

def pytest_runtest_teardown(item):
    registry = sys.modules.get("mlx_sinks.patches.registry")
    for name, patch in (registry._patches if registry else {}).items():
        module = sys.modules.get(patch.target.module)
        if module and patch.is_on(module):
            item.user_properties.append(("patched", name))
"""


def main() -> int:
    script = Script(__doc__)
    where = "folder for the tests and what they say"
    script.add_argument("--build", type=folder, required=True, help=where)
    options = script.parse_args()
    return run(script.prog, lambda: compare(options.build, script))


def compare(build: Path, script: Script) -> None:
    """Run both arms and show them; what isn't right is a sentence."""
    home = unpacked(build.resolve(), version("mlx-lm"))
    result = {**environment(), **measure(home)}
    script.put(result, show)
    off, on = (result["arms"][arm] for arm in ARMS)
    if not off["passed"]:
        raise ValueError("no test passes with mlx-sinks off: nothing was compared")
    if off["patched"] or not on["patched"]:
        raise ValueError(f"patched off: {off['patched']}, on: {on['patched']}")
    if lost := [test for test in result["different"] if test["off"] == "passed"]:
        raise ValueError(f"tests that pass with mlx-sinks off only: {len(lost)}")


def unpacked(build: Path, release: str) -> Path:
    """The folder of a release with its ``tests``, whole or not there at all."""
    home, top = build / release, f"mlx_lm-{release}"
    home.mkdir(parents=True, exist_ok=True)
    sdist, tests = home / f"{top}.tar.gz", home / "tests"
    with TemporaryDirectory(dir=home) as unfinished:
        if not sdist.exists():
            download(release, unfinished).replace(sdist)
        if not tests.exists():
            try:
                with tarfile.open(sdist) as archive:
                    parts = [m for m in archive if m.name.startswith(f"{top}/tests/")]
                    archive.extractall(unfinished, parts, filter="data")
            except (tarfile.TarError, EOFError) as error:
                raise ValueError(f"remove {sdist}: it is broken ({error})") from None
            (Path(unfinished) / top / "tests").rename(tests)
    # Without these, the configuration of whatever lies above would be theirs.
    (home / "pytest.ini").write_text("[pytest]\n")
    (home / "conftest.py").write_text(CONFTEST)
    write_stand_ins(tests, home / "hub")
    return home


def download(release: str, target: str) -> Path:
    """The source distribution; pip builds its metadata, but installs nothing."""
    print(f"Fetching the source of mlx-lm {release} …", file=sys.stderr)
    pip = (sys.executable, "-m", "pip", "download", "--disable-pip-version-check")
    what = ("--no-deps", "--no-binary", "mlx-lm", f"mlx-lm=={release}")
    argv = [*pip, "--quiet", "--dest", target, *what]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode == 0 and (found := list(Path(target).glob("*.tar.gz"))):
        return found[0]
    lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
    reason = next((line for line in lines if line.startswith("ERROR")), lines[-1])
    raise ValueError(f"pip can't fetch the source of mlx-lm {release}: {reason}")


def write_stand_ins(tests: Path, hub: Path) -> None:
    """A cache of the hub in which the tests' model, a Qwen, is a small random one."""
    sources = "".join(path.read_text() for path in tests.glob("test_*.py"))
    for name in set(re.findall(r'HF_MODEL_PATH = "(.+)"', sources)):
        cached = hub / f"models--{name.replace('/', '--')}"
        (cached / "refs").mkdir(parents=True, exist_ok=True)
        (cached / "refs" / "main").write_text("0" * 40)
        write_qwen(cached / "snapshots" / ("0" * 40))


def write_qwen(folder: Path) -> None:
    """Of one layer, and heads of a size that can be quantised."""
    facts = {**small_models.LLAMA, "model_type": "qwen2", "hidden_size": 128}
    facts |= {"num_key_value_heads": 2, "tie_word_embeddings": False}
    mx.random.seed(0)
    model = qwen2.Model(qwen2.ModelArgs.from_dict(facts))
    small_models.save_folder(folder, facts, model)


def measure(home: Path) -> dict[str, Any]:
    """Both arms, and the tests in which they differ."""
    arms, found = {}, {}
    for arm in ARMS:
        print(f"mlx-sinks {arm}:", file=sys.stderr)
        start = perf_counter()
        found[arm], patched = read(run_tests(home, arm))
        ends = [outcome for outcome, _ in found[arm].values()]
        arms[arm] = {outcome: ends.count(outcome) for outcome in OUTCOMES}
        arms[arm] |= {"patched": patched, "seconds": perf_counter() - start}
    different, failed_both = [], {}
    for test in sorted(found["off"] | found["on"]):
        off, on = (found[arm].get(test, ("not run", "")) for arm in ARMS)
        if off[0] != on[0]:
            why = on[1] or off[1]
            different.append({"test": test, "off": off[0], "on": on[0], "why": why})
        elif off[0] == "failed":
            failed_both[test] = off[1]
    return {"arms": arms, "different": different, "failed_both": failed_both}


def run_tests(home: Path, arm: str) -> Path:
    """The report, which alone counts: mlx may abort at the end of a good run."""
    report = home / f"{arm}.xml"
    report.unlink(missing_ok=True)
    spread = ("--numprocesses", "2", "--dist", "loadfile")  # a crash costs one test
    limits = ("--timeout=300", "--continue-on-collection-errors")
    quiet = ("-q", "--no-summary", "--tb=short", "-p", "no:cacheprovider")
    variables = {"HF_HUB_CACHE": str(home / "hub"), **ARMS[arm]}
    argv = [sys.executable, "-m", "pytest", *spread, *limits, *quiet]
    log = report.with_suffix(".log")
    with log.open("wb") as stderr:
        done = subprocess.run(
            [*argv, "--junitxml", report],
            cwd=home / "tests",
            stdout=sys.stderr,
            stderr=stderr,
            env=with_fast_blas(processes.environment(**variables)),
            start_new_session=True,  # Ctrl-C comes to us, and pytest ends with a kill
        )
    if not report.exists() or done.returncode in (2, 3, 4):  # pytest's own failures
        raise ValueError(f"pytest ended with {done.returncode}: see {log}")
    return report


def read(report: Path) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Each test's outcome and what it says, and the patches that were in."""
    suite = ElementTree.parse(report).getroot()
    found: dict[str, tuple[str, str]] = {}
    for case in suite.iter("testcase"):
        name = ".".join(filter(None, (case.get("classname"), case.get("name"))))
        ends = [found.get(name, ("passed", ""))]
        for part in case:
            if part.tag in ("failure", "error", "skipped"):
                outcome = "skipped" if part.tag == "skipped" else "failed"
                ends.append((outcome, part.get("message", "")))
        found[name] = max(ends, key=lambda end: OUTCOMES.index(end[0]))
    names = suite.iterfind(".//property[@name='patched']")
    return found, sorted({part.get("value", "") for part in names})


def show(result: dict[str, Any], console: Console) -> None:
    title = f"Tests of mlx-lm {result['versions']['mlx-lm']}"
    view = new_table(title, "mlx-sinks", *OUTCOMES, "seconds", "patched")
    for arm, row in result["arms"].items():
        counts = [str(row[outcome]) for outcome in OUTCOMES]
        view.add_row(arm, *counts, f"{row['seconds']:.0f}", ", ".join(row["patched"]))
    console.print(view)
    both = result["failed_both"].values()
    hub = sum(1 for why in both if WANTS_HUB.search(why))
    console.print(f"Failed both ways: {len(both)}, {hub} of them for want of the hub.")
    for test in result["different"]:
        line = f"{test['test']}: {test['off']} off, {test['on']} on. {test['why']}"
        console.print(line, markup=False, style="bold")


if __name__ == "__main__":
    sys.exit(main())
