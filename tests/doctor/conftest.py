"""The doctor in this process."""

import json

import pytest

from mlx_sinks import cli


@pytest.fixture
def doctor(monkeypatch, capsys):
    """Runs the command in this process; status and what it printed as JSON."""

    def run(*options, variable=None):
        monkeypatch.delenv("MLX_SINKS", raising=False)
        if variable:
            monkeypatch.setenv("MLX_SINKS", variable)
        capsys.readouterr()
        status = cli.main(["doctor", "--json", *map(str, options)])
        printed = capsys.readouterr().out
        return status, json.loads(printed) if printed else None

    return run
