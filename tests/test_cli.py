"""``mlx-sinks run`` and the options around it."""

import sys

import pytest

import mlx_sinks
from processes import command, python, run

SHOW_VARIABLE = 'import os; print(os.environ["MLX_SINKS"])'
SHOW_ARGUMENTS = "import sys; print(sys.argv[1:])"


def mlx_sinks_run(*arguments, **variables):
    return run(command("mlx-sinks"), "run", *arguments, **variables)


def refused(outcome, status, *words):
    """Ended with one sentence that has these words."""
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("mlx-sinks: ")
    assert all(word in line for word in words)
    assert (outcome.status, outcome.stdout) == (status, "")
    return True


@pytest.mark.parametrize(
    ("options", "inherited", "seen"),
    [
        ([], None, "1"),
        ([], "", "1"),
        ([], "0", "1"),
        ([], "off", "1"),
        ([], "1", "1"),
        ([], "on", "1"),
        ([], "sinks=8,recency=128", "sinks=8,recency=128"),
        ([], "rotating=0", "rotating=0"),
        (["--sinks", "8"], None, "sinks=8"),
        (["--recency", "16"], "0", "recency=16"),
        (["--sinks", "8", "--recency", "16"], None, "sinks=8,recency=16"),
        (["--sinks=0", "--recency=0"], None, "sinks=0,recency=0"),
        (["--kv-budget=256"], "dsa=0", "kv_budget=256,dsa=0"),
        (["--sinks", "2"], "sinks=8,recency=128", "sinks=2,recency=128"),
        (
            ["--sinks", "2"],
            "scoring=upstream,score_memory=1GB,rotating=0",
            "sinks=2,scoring=upstream,score_memory=1000000000,rotating=0",
        ),
    ],
)
def test_the_command_sees_this_value(options, inherited, seen):
    variables = {} if inherited is None else {"MLX_SINKS": inherited}
    outcome = mlx_sinks_run(*options, sys.executable, "-c", SHOW_VARIABLE, **variables)
    assert (outcome.status, outcome.stderr) == (0, "")
    assert outcome.stdout == f"{seen}\n"


@pytest.mark.parametrize("dashes", [[], ["--"]], ids=["", "after --"])
def test_arguments_reach_the_command_as_they_are(dashes):
    arguments = ["--sinks", "3", "--", "--help", "--version", "two words", "", "-x"]
    outcome = mlx_sinks_run(*dashes, sys.executable, "-c", SHOW_ARGUMENTS, *arguments)
    assert (outcome.status, outcome.stderr) == (0, "")
    assert outcome.stdout == f"{arguments}\n"


@pytest.mark.parametrize("status", [0, 1, 7])
def test_the_exit_status_is_the_commands(status):
    outcome = mlx_sinks_run(sys.executable, "-c", f"raise SystemExit({status})")
    assert (outcome.status, outcome.stdout, outcome.stderr) == (status, "", "")


def test_a_signal_that_ends_the_command_is_seen_outside():
    code = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    assert mlx_sinks_run(sys.executable, "-c", code).status == -15


def test_input_and_both_outputs_are_the_commands():
    code = "import sys; print(sys.stdin.read().upper()); print('!', file=sys.stderr)"
    outcome = mlx_sinks_run(sys.executable, "-c", code, stdin="müde\nlines")
    assert (outcome.status, outcome.stdout) == (0, "MÜDE\nLINES\n")
    assert outcome.stderr == "!\n"


@pytest.mark.parametrize(
    ("options", "variables", "words"),
    [
        (["--sinks", "x"], {}, ["sinks", "'x'", "whole number"]),
        (["--sinks", "-1"], {}, ["sinks", "'-1'", "whole number"]),
        (["--recency=1.5"], {}, ["recency", "'1.5'", "whole number"]),
        (["--recency="], {}, ["recency", "whole number"]),
        (["--sinks", "4,recency=7"], {}, ["sinks", "'4,recency=7'", "whole number"]),
        ([], {"MLX_SINKS": "sinks=x"}, ["MLX_SINKS", "'x'", "sinks=8,recency=128"]),
        ([], {"MLX_SINKS": "8"}, ["MLX_SINKS", "'8'", "sinks=8,recency=128"]),
    ],
)
def test_a_malformed_policy_is_refused_before_the_command(options, variables, words):
    outcome = mlx_sinks_run(*options, sys.executable, "-c", "print('ran')", **variables)
    assert refused(outcome, 2, *words)


def test_an_unknown_command_is_a_sentence():
    assert refused(mlx_sinks_run("no-such-command", "-x"), 127, "no-such-command")


@pytest.mark.parametrize("arguments", [[], ["--"], ["--sinks", "4"], [""]])
def test_run_without_a_command_is_a_sentence(arguments):
    assert refused(mlx_sinks_run(*arguments), 2, "mlx-sinks run mlx_lm.generate")


@pytest.mark.parametrize("arguments", [[], ["walk"], ["run", "--sink-count", "4"]])
def test_unknown_usage_ends_with_status_2(arguments):
    outcome = run(command("mlx-sinks"), *arguments)
    assert (outcome.status, outcome.stdout) == (2, "")
    assert "Traceback" not in outcome.stderr
    assert "usage: mlx-sinks" in outcome.stderr


@pytest.mark.parametrize("variables", [{}, {"MLX_SINKS": "sinks=x"}])
def test_version(variables):
    outcome = run(command("mlx-sinks"), "--version", **variables)
    assert (outcome.status, outcome.stderr) == (0, "")
    assert outcome.stdout.strip() == mlx_sinks.__version__


@pytest.mark.parametrize("module", ["mlx_sinks", "mlx_sinks.cli"])
def test_as_a_module_it_is_the_same_command(module):
    outcome = run(sys.executable, "-m", module, "--version")
    assert (outcome.status, outcome.stderr) == (0, "")
    assert outcome.stdout.strip() == mlx_sinks.__version__


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"]])
def test_help_names_what_it_can_do(arguments):
    outcome = run(command("mlx-sinks"), *arguments, COLUMNS="200")
    assert (outcome.status, outcome.stderr) == (0, "")
    assert "MLX_SINKS" in outcome.stdout


@pytest.mark.parametrize("name", ["run", "probe", "doctor"])
def test_help_has_an_example(name):
    outcome = run(command("mlx-sinks"), name, "--help", COLUMNS="200")
    assert f"Example: mlx-sinks {name} " in outcome.stdout


def test_options_are_read_without_mlx():
    code = "import sys, mlx_sinks.cli; print({'mlx', 'mlx_lm'} & sys.modules.keys())"
    assert python(code).stdout == "set()\n"
