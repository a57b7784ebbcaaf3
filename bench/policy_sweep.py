"""How many sinks and how much recency: perplexity over a grid of policies.

    python bench/policy_sweep.py --model build/smollm2

Each cell is the perplexity past index_topk over that of the dense model, the mean over
the seeds of random weights, or the files of trained ones. One table for each kind of
indexer, and one of the worst kind in each cell. Finished parts are kept under --parts:
a run that was interrupted goes on there.
"""

from __future__ import annotations

import argparse
import re
import sys
from itertools import product

import numpy as np
from rich.console import Console

import mlx_sinks
from smollm2 import zoo
from tools.arms import dense
from tools.blas import restart_with_fast_blas
from tools.output import bars, new_table
from tools.parts import finished
from tools.script import Script
from tools.texts import perplexity_past, token_losses

KINDS = ("random", "RoPE flipped", "trained", "shared by four")


def main() -> int:
    restart_with_fast_blas()
    script = Script(__doc__)
    zoo.add_zoo(script, KINDS, "build/sweep")
    for name, grid in (("sinks", [0, 1, 2, 4, 8]), ("recency", [0, 16, 64, 128, 256])):
        said = f"default: {' '.join(map(str, grid))}"
        script.add_argument(f"--{name}", type=int, nargs="+", default=grid, help=said)
    options = script.parse_args()
    stopped = "stopped; the same command goes on with the parts that are left"
    return script.report(lambda: measure(options), show, stopped=stopped)


def measure(options: argparse.Namespace) -> dict:
    """Every policy with every case of the zoo."""
    policies = [
        mlx_sinks.SinkPolicy(sinks, recency)
        for sinks, recency in product(options.sinks, options.recency)
    ]
    index_topk = options.index_topk
    for policy in policies:
        policy.fit(index_topk)
    animals, _, ids, facts = zoo.open_zoo(options)
    model = animals.make(zoo.Case("random"))
    with dense(model):
        control = perplexity_past(token_losses(model, ids), index_topk)
    rows = []
    with bars() as progress:
        chosen = zoo.cases(options.indexers, options.seeds, options.trained)
        task = progress.add_task("", total=len(chosen) * len(policies))
        for case in chosen:
            model = animals.make(case)
            for policy in policies:
                progress.update(task, description=f"{case}, {policy}")
                title = (
                    f"{case} {policy.sinks} {policy.recency} "
                    f"{facts['text']} {facts['tokens']}"
                )
                name = re.sub(r"[^\w.]+", "-", title)

                def compute(model=model, policy=policy) -> dict:
                    with mlx_sinks.patched(policy):
                        losses = token_losses(model, ids)
                    return {"perplexity": perplexity_past(losses, index_topk)}

                path = options.parts / f"{name}.json"
                known = {**facts, "case": str(case), "weights": case.digest()}
                result = finished(path, known, compute)
                rows.append(
                    {
                        "indexers": case.kind,
                        "sample": case.sample,
                        "sinks": policy.sinks,
                        "recency": policy.recency,
                        "times_dense": result["perplexity"] / control,
                        **result,
                    }
                )
                progress.advance(task)
    return {**facts, "dense": control, "rows": rows}


def show(result: dict, console: Console) -> None:
    rows = result["rows"]
    kinds = list(dict.fromkeys(row["indexers"] for row in rows))
    grids = {kind: grid(rows, kind) for kind in kinds}
    if len(kinds) > 1:
        worst = {
            place: max(of_kind[place] for of_kind in grids.values())
            for place in grids[kinds[0]]
        }
        grids["the worst of these"] = worst
    for kind, cells in grids.items():
        recencies = sorted({recency for _, recency in cells})
        title = f"{kind}: perplexity over dense ({result['dense']:.2f})"
        headings = (f"recency {recency}" for recency in recencies)
        view = new_table(title, "sinks", *headings)
        for sinks in sorted({sinks for sinks, _ in cells}):
            values = [f"{cells[sinks, recency]:.3f}" for recency in recencies]
            view.add_row(str(sinks), *values)
        console.print(view)


def grid(rows: list[dict], kind: str) -> dict[tuple[int, int], float]:
    """The mean over samples for each (sinks, recency)."""
    cells: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        if row["indexers"] == kind:
            place = row["sinks"], row["recency"]
            cells.setdefault(place, []).append(row["times_dense"])
    return {place: float(np.mean(values)) for place, values in cells.items()}


if __name__ == "__main__":
    sys.exit(main())
