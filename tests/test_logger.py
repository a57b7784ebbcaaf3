"""What a program reads of us, by how it has configured its logging."""

import pytest

from processes import python

BUILD = """
import mlx_sinks
from mlx_sinks.logger import inform, warn
inform("a line"), inform("a line"), warn("a warning"), warn("a warning")
"""
BASIC = """
import logging
logging.basicConfig(level=logging.{}, format="%(levelname)s|%(name)s|%(message)s")
"""


def said(prelude="", **variables):
    outcome = python(prelude + BUILD, **variables)
    assert (outcome.status, outcome.stdout) == (0, "")
    return outcome.stderr.splitlines()


def test_without_logging_they_are_lines_each_once():
    assert said() == ["mlx-sinks: a line", "mlx-sinks: a warning"]


def test_quiet_silences_lines_and_no_warning():
    assert said(MLX_SINKS_QUIET="1") == ["mlx-sinks: a warning"]


@pytest.mark.parametrize(
    ("level", "shown"), [("INFO", 2), ("WARNING", 1), ("ERROR", 0)]
)
def test_a_program_that_logs_gets_records(level, shown):
    records = [
        "INFO|mlx_sinks|mlx-sinks: a line",
        "WARNING|mlx_sinks|mlx-sinks: a warning",
    ]
    assert said(BASIC.format(level)) == records[2 - shown :]


def test_our_logger_alone_can_be_silenced():
    code = "import logging; logging.getLogger('mlx_sinks').setLevel(logging.WARNING)\n"
    assert said(code) == ["mlx-sinks: a warning"]
    code = "import logging; logging.getLogger('mlx_sinks').setLevel(logging.ERROR)\n"
    assert said(code) == said(BASIC.format("INFO") + code) == []
