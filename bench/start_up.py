"""What the variable costs a Python process that never imports mlx-lm.

    python bench/start_up.py

Whole processes of ``python -c pass``, one after the other in a shuffled order, with
``MLX_SINKS`` unset and set; the medians in milliseconds.
differences.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable

from rich.console import Console

from tools.arguments import count
from tools.output import environment, new_table
from tools.rounds import in_turn, median
from tools.script import Script

ARMS = {"unset": {}, "set": {"MLX_SINKS": "1"}}


def main() -> int:
    script = Script(__doc__)
    script.add_argument("--rounds", type=count, default=50, help="of each arm")
    options = script.parse_args()
    return script.report(lambda: measure(options), show)


def measure(options: argparse.Namespace) -> dict:
    """Times in milliseconds."""
    times = in_turn({arm: process(ARMS[arm]) for arm in ARMS}, options.rounds)
    rows = [{"variable": arm, "ms": 1000 * median(times, arm)} for arm in ARMS]
    return {"rounds": options.rounds, "rows": rows, **environment()}


def process(variables: dict[str, str]) -> Callable[[], float]:
    """What runs a process of nothing, and returns its seconds."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("MLX_SINKS")}

    def run() -> float:
        start = time.perf_counter()
        command = [sys.executable, "-c", "pass"]
        subprocess.run(command, env=inherited | variables, check=True)
        return time.perf_counter() - start

    return run


def show(result: dict, console: Console) -> None:
    view = new_table("python -c pass", "variable", "ms")
    for row in result["rows"]:
        view.add_row(row["variable"], f"{row['ms']:.1f}")
    console.print(view)


if __name__ == "__main__":
    sys.exit(main())
