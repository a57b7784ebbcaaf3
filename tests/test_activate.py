"""The start-up hook: what an interpreter does before and until it imports mlx-lm."""

import json
import sys
from importlib.metadata import distribution

import pytest

from processes import python

# Answers with the names among its arguments that are loaded.
LOADED = """
import json, sys
print(json.dumps([name for name in sys.argv[1:] if name in sys.modules]))
"""

MALFORMED = "sinks=x"

# Imports a module twice, as a program does that catches the first error.
TWICE = """
import importlib, sys
for _ in range(2):
    try:
        importlib.import_module(sys.argv[1])
        print("imported")
    except (ValueError, RuntimeError) as error:
        print(type(error).__name__)
"""
# Whether ours is what upstream's indexers call.
PATCHED = """
from mlx_lm.models.deepseek_v32 import Indexer
print(hasattr(Indexer.__call__, "sinks_mark"))
"""


def loaded(*names, **variables):
    outcome = python(LOADED, *names, **variables)
    assert (outcome.status, outcome.stderr) == (0, "")
    return json.loads(outcome.stdout)


@pytest.mark.parametrize("off", [{}, {"MLX_SINKS": ""}, {"MLX_SINKS": "0"}])
def test_nothing_is_loaded_where_the_variable_is_not_set(off):
    assert loaded("mlx_sinks", "wrapt", "mlx.core", **off) == []


def test_another_word_for_off_watches_for_nothing():
    names = ("wrapt", "mlx_sinks.patches", "mlx.core")
    assert loaded(*names, MLX_SINKS="off") == []


@pytest.mark.parametrize("value", ["1", "sinks=8,recency=128", MALFORMED])
def test_a_program_without_mlx_lm_gets_the_hook_alone(value):
    """Whatever else it imports later: every Python process of the shell pays for it."""
    code = "import json, sys; print(json.dumps(sorted(sys.modules)))"
    on, off = (
        set(json.loads(python(code, **variables).stdout))
        for variables in ({"MLX_SINKS": value}, {})
    )
    ours = {
        "mlx_sinks",
        *(f"mlx_sinks.{n}" for n in ("activate", "targets", "variable")),
    }
    assert on - off == ours | {"__future__"}


FOUND = """
import importlib.util, sys
spec = importlib.util.find_spec("mlx_lm")
assert "mlx_sinks.on_import" not in sys.modules
import mlx_lm
assert "mlx_sinks.on_import" in sys.modules
own = mlx_lm.__spec__.loader
assert own is mlx_lm.__loader__ and type(own) is not type(spec.loader)
assert own.get_source("mlx_lm") == spec.loader.get_source("mlx_lm")
import mlx_lm.models.deepseek_v32 as module
assert hasattr(module.Indexer.__call__, "sinks_mark")
"""


def test_looking_for_upstream_is_not_importing_it():
    """The package keeps its own loader, and its modules are patched."""
    outcome = python(FOUND, MLX_SINKS="1", MLX_SINKS_QUIET="1")
    assert (outcome.status, outcome.stderr) == (0, "")


def test_a_variable_that_the_program_changes_counts_as_upstream_is_imported():
    code = "import os\nos.environ['MLX_SINKS'] = {!r}\n" + TWICE
    for before, after, said in [
        ("1", MALFORMED, ["PolicyError"] * 2),
        (MALFORMED, "1", ["imported"] * 2),
        ("1", "0", ["imported"] * 2),
    ]:
        module = "mlx_lm.models.deepseek_v32"
        patched = PATCHED if said == ["imported"] * 2 else "print(False)"
        outcome = python(code.format(after) + patched, module, MLX_SINKS=before)
        assert outcome.stdout.split() == [*said, str(after == "1")]
        assert outcome.stderr == ""


def test_what_is_uninstalled_stays_so():
    """Also where the program imports more of upstream afterwards."""
    code = "import mlx_lm, mlx_sinks; mlx_sinks.uninstall()\n" + PATCHED
    outcome = python(code, MLX_SINKS="1")
    assert (outcome.status, outcome.stdout, outcome.stderr) == (0, "False\n", "")
    again = python(code.replace("uninstall()", "uninstall(); mlx_sinks.install()"))
    assert again.stdout == "True\n"


def test_upstream_that_was_imported_first_is_patched_later():
    """Another package's .pth file may come before ours."""
    code = """
import sys
import mlx_lm
from mlx_sinks.activate import UpstreamFinder, start
start(), start()
assert sum(isinstance(f, UpstreamFinder) for f in sys.meta_path) == 1
import os
"""
    code = f"import os; os.environ['MLX_SINKS'] = '1'\n{code}"
    outcome = python(code + PATCHED)
    assert (outcome.status, outcome.stdout, outcome.stderr) == (0, "True\n", "")


def test_the_pth_line_looks_at_the_environment_and_imports_nothing():
    installed = distribution("mlx-sinks").locate_file("mlx_sinks.pth")
    (line,) = installed.read_text().splitlines()
    calls, before = [], dict(sys.modules)

    def note(frame, event, called):
        if event in ("call", "c_call"):
            calls.append(called.__name__ if called else frame.f_code.co_name)

    sys.setprofile(note)
    try:
        exec(line, {})
    finally:
        sys.setprofile(None)
    assert sys.modules == before
    looking = {"get", "__getitem__", "encode", "isinstance"}
    assert set(calls) <= {"exec", "<module>", *looking, "setprofile"}
    assert len(calls) < 10


def test_mlx_lm_alone_is_not_patched_before_a_model_is_imported():
    code = "import mlx_lm\n" + LOADED
    outcome = python(code, "mlx_lm.models.deepseek_v32", MLX_SINKS="1")
    assert (outcome.status, outcome.stdout, outcome.stderr) == (0, "[]\n", "")


def test_a_program_that_tries_again_is_refused_again():
    outcome = python(TWICE, "mlx_lm", MLX_SINKS=MALFORMED)
    assert outcome.stdout.split() == ["PolicyError"] * 2
    assert (outcome.status, outcome.stderr) == (0, "")


def test_errors_of_others_keep_their_traceback():
    code = """
import threading
import mlx_lm
def fail():
    raise KeyError("theirs")
thread = threading.Thread(target=fail)
thread.start()
thread.join()
fail()
"""
    on, off = (python(code, **on) for on in ({"MLX_SINKS": "1"}, {}))
    assert on.stderr.count("\nKeyError: 'theirs'") == 2
    assert on == off
