"""What the probe's hook costs a selection when nobody listens.

    python bench/probe_cost.py

Side by side in one process, alternating: the selection as it is, and the same source
without the two lines of the hook. One decode step's selection of 2,048 columns; medians
over the rounds, and the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import inspect
import re
import statistics
import sys
from collections.abc import Callable
from time import perf_counter

import mlx.core as mx
from rich.console import Console
from rich.table import Table

from arguments import HelpFormatter, add_output, count, environment, put_out, run
from mlx_sinks import SinkPolicy
from mlx_sinks.sparse import selection

INDEX_TOPK = 2048
HOOK = r"    if \(listener := .*\n        .*_heard\(.*\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--columns", type=count, nargs="+", default=[4096, 32768], help="T")
    add("--rounds", type=count, default=100, help="of each length")
    add("--calls", type=count, default=20, help="of each way in a round")
    add_output(parser)
    options = parser.parse_args()
    return run("probe_cost.py", lambda: put_out(measure(options), options, show))


def measure(options: argparse.Namespace) -> dict:
    """Times in microseconds a call, for each number of columns."""
    rows = []
    for columns in options.columns:
        scores = mx.random.normal((1, 1, 1, columns), key=mx.random.key(0))
        ways = {"hook": selection.select_columns, "none": without_hook()}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for select in ways.values():
            timed(select, scores, options.calls)  # to warm up
        for _ in range(options.rounds):
            for name, select in ways.items():
                times[name].append(timed(select, scores, options.calls))
        ratios = [with_it / without for with_it, without in zip(*times.values())]
        rows.append(
            {
                "columns": columns,
                "with_hook_us": statistics.median(times["hook"]),
                "without_us": statistics.median(times["none"]),
                "ratio": statistics.median(ratios),
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


def timed(select: Callable[..., mx.array], scores: mx.array, calls: int) -> float:
    start = perf_counter()
    for _ in range(calls):
        mx.eval(select(scores, INDEX_TOPK, SinkPolicy()))
    return 1e6 * (perf_counter() - start) / calls


def show(result: dict, console: Console) -> None:
    view = Table(
        title=f"One selection of {result['index_topk']} columns, nobody listens"
    )
    for heading in ("columns", "with the hook (µs)", "without (µs)", "ratio"):
        view.add_column(heading, justify="right")
    for row in result["rows"]:
        times = [f"{row[name]:.1f}" for name in ("with_hook_us", "without_us")]
        view.add_row(str(row["columns"]), *times, f"{row['ratio']:.4f}")
    console.print(view)


if __name__ == "__main__":
    sys.exit(main())
