"""The start-up hook: what an interpreter does before and until it imports mlx-lm."""

import json
import sys
from importlib.metadata import distribution

import pytest

import releases
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

UNSUPPORTED = releases.PRETEND.format(package="mlx-lm", release="0.99.0")


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
    names = ("mlx_sinks.activate", "mlx_sinks.patches", "mlx.core", "mlx", "numpy")
    assert loaded(*names, MLX_SINKS=value) == ["mlx_sinks.activate"]


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


@pytest.mark.parametrize(
    ("prelude", "module", "value", "error"),
    [
        ("", "mlx_lm", MALFORMED, "PolicyError"),
        (UNSUPPORTED, "mlx_lm.models.glm_moe_dsa", "1", "PatchError"),
    ],
    ids=["policy", "patch"],
)
def test_a_program_that_tries_again_is_refused_again(prelude, module, value, error):
    outcome = python(prelude + TWICE, module, MLX_SINKS=value)
    assert outcome.stdout.split() == [error, error]
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
