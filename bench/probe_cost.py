"""What the probe's hook costs a selection when nobody watches.

    python bench/probe_cost.py

Side by side in one process, alternating: the selection as it is, and the same source
without the two lines of the hook. One decode step's selection of 2,048 columns; medians
over the rounds, and the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable
from functools import partial

import mlx.core as mx
from rich.console import Console

from mlx_sinks import SinkPolicy
from mlx_sinks.sparse import selection  # what is measured is a line in there
from tools.arguments import count
from tools.output import environment, new_table
from tools.rounds import in_turn, median, ratio, seconds
from tools.script import Script

INDEX_TOPK = 2048
HOOK = r"    if \(watcher := .*\n        .*_shown\(.*\n"


def main() -> int:
    script = Script(__doc__)
    add = script.add_argument
    add("--columns", type=count, nargs="+", default=[4096, 32768], help="T")
    add("--rounds", type=count, default=100, help="of each length")
    add("--calls", type=count, default=20, help="of each way in a round")
    options = script.parse_args()
    return script.report(lambda: measure(options), show)


def measure(options: argparse.Namespace) -> dict:
    """Times in microseconds a call, for each number of columns."""
    rows = []
    for columns in options.columns:
        scores = mx.random.normal((1, 1, 1, columns), key=mx.random.key(0))
        ways = {"hook": selection.select_columns, "none": without_hook()}
        arms = {}
        for way, select in ways.items():
            call = partial(select, scores, INDEX_TOPK, SinkPolicy())
            arms[way] = partial(seconds, call, options.calls)
        times = in_turn(arms, options.rounds)
        rows.append(
            {
                "columns": columns,
                "with_hook_us": 1e6 * median(times, "hook"),
                "without_us": 1e6 * median(times, "none"),
                "ratio": ratio(times, "hook", "none"),
            }
        )
    return {"index_topk": INDEX_TOPK, "rows": rows, **environment()}


def without_hook() -> Callable[..., mx.array]:
    """``select_columns`` from its own source, the hook's two lines left out."""
    source, removed = re.subn(HOOK, "", inspect.getsource(selection.select_columns))
    if removed != 1:
        raise ValueError("the hook isn't where this script looks for it")
    names = dict(vars(selection))
    exec(source, names)
    return names["select_columns"]


def show(result: dict, console: Console) -> None:
    title = f"One selection of {result['index_topk']} columns, nobody watches"
    headings = ("columns", "with the hook (µs)", "without (µs)", "ratio")
    view = new_table(title, *headings)
    for row in result["rows"]:
        times = [f"{row[name]:.1f}" for name in ("with_hook_us", "without_us")]
        view.add_row(str(row["columns"]), *times, f"{row['ratio']:.4f}")
    console.print(view)


if __name__ == "__main__":
    sys.exit(main())
