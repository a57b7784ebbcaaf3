"""What healthy and sick indexers do to SmolLM2, with and without the guarantee.

    python bench/failure_zoo.py --model build/smollm2

For each kind of indexer and arm, the mean and the range over the seeds of random
weights, or over the files of trained ones (train_indexer.py writes more):

  perplexity    of a text past index_topk, teacher-forced
  x dense       its ratio to the same without indexers
  surprise      perplexity, to the dense model, of texts generated past index_topk
  repeats 4     share of those texts inside a repeated 4-gram
  sinks kept    share of the policy's sinks in the arm's selections (all of them with
                the guarantee: that is what it guarantees)
  mass          share of dense attention on the arm's selected columns
  skill         of the choice by scores alone: 0 a blind one, 1 the best possible

Finished parts are kept under --parts: a run that was interrupted goes on there.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from statistics import mean

import mlx.nn as nn
import numpy as np
from rich.console import Console
from rich.markup import escape

import mlx_sinks
from mlx_sinks.measuring.repetition import repetition
from smollm2 import zoo
from tools.arguments import add_policy, count
from tools.arms import arms, dense
from tools.blas import restart_with_fast_blas
from tools.output import bars, new_table
from tools.parts import finished
from tools.script import Script
from tools.texts import (
    generate,
    perplexity,
    perplexity_past,
    probed,
    text_losses,
    token_losses,
)

MEASURES = {
    "perplexity": ("perplexity", "{:.2f}"),
    "times_dense": ("x dense", "{:.3f}"),
    "surprise": ("surprise", "{:.2f}"),
    "repeats_4": ("repeats 4", "{:.0%}"),
    "sinks_kept": ("sinks kept", "{:.0%}"),
    "mass": ("mass", "{:.3f}"),
    "skill": ("skill", "{:.2f}"),
}


def main() -> int:
    restart_with_fast_blas()
    script = Script(__doc__)
    add = script.add_argument
    zoo.add_zoo(script, tuple(zoo.KINDS), "build/zoo")
    add("--texts", type=count, default=8, help="to generate in each arm")
    add("--generate", type=int, default=128, help="tokens of each text; 0: no texts")
    add_policy(script)
    options = script.parse_args()
    stopped = "stopped; the same command goes on with the parts that are left"
    return script.report(lambda: measure(options), show, stopped=stopped)


def measure(options: argparse.Namespace) -> dict:
    """All kinds of indexers in all arms."""
    index_topk = options.index_topk
    policy = mlx_sinks.SinkPolicy(options.sinks, options.recency).fit(index_topk)
    if options.generate < 0:
        raise ValueError(f"--generate {options.generate}: 0, or tokens to generate")
    animals, tokenizer, ids, facts = zoo.open_zoo(options)
    facts["policy"] = str(policy)
    sampling = {"temp": 0.8, "top_p": 0.95, "seed": 0}
    writing = {"texts": options.texts, "generated": options.generate, **sampling}
    never = sorted(tokenizer.eos_token_ids)
    chosen = zoo.cases(options.indexers, options.seeds, options.trained)

    def read(model: nn.Module, arm: str) -> dict:
        losses = functools.partial(token_losses, model, ids)
        with arms(model, policy)[arm]():
            if arm == "dense":
                values, seen = losses(), {}
            else:
                values, seen = probed(model, policy, losses)
        if arm == "sinks":
            seen |= {"mass": seen["mass_guaranteed"], "sinks_kept": 1.0}
        return {"perplexity": perplexity_past(values, index_topk), **seen}

    def write(model: nn.Module, arm: str) -> dict:
        prompt, length = ids[:index_topk], options.generate
        with arms(model, policy)[arm]():
            texts = generate(
                model, prompt, length, options.texts, never=never, **sampling
            )
        with dense(model):
            losses = text_losses(model, prompt, texts)
        repeated = [repetition(text, length)[0].repeated[4] for text in texts]
        return {"surprise": perplexity(losses), "repeats_4": mean(repeated)}

    with bars() as progress:
        ways = 2 if options.generate else 1
        task = progress.add_task("", total=ways * (1 + 2 * len(chosen)))

        def part(case: zoo.Case | None, arm: str) -> dict:
            """All figures of an arm; a ``None`` case is the model without indexers."""
            figures = {}
            for work, known in ((read, facts), (write, facts | writing))[:ways]:
                title = f"{case or 'no indexer'}, {arm}, {work.__name__}"
                progress.update(task, description=title)
                known = {**known, "part": title, "weights": case and case.digest()}
                name = f"{title} {facts['text']} {facts['tokens']}"
                name = re.sub(r"[^\w.]+", "-", name)

                def compute(work=work) -> dict:
                    return work(animals.make(case or zoo.Case("random")), arm)

                figures |= finished(options.parts / f"{name}.json", known, compute)
                progress.advance(task)
            return figures

        control = part(None, "dense")
        rows = [{"indexers": "none", "sample": None, "arm": "dense", **control}]
        for case in chosen:
            for arm in ("stock", "sinks"):
                named = {"indexers": case.kind, "sample": case.sample, "arm": arm}
                rows.append({**named, **part(case, arm)})
    for row in rows:
        row["times_dense"] = row["perplexity"] / control["perplexity"]
    return {**facts, **(writing if options.generate else {}), "rows": rows}


def show(result: dict, console: Console) -> None:
    view = new_table(
        f"index_topk {result['index_topk']}, {result['tokens']} tokens of "
        f"{escape(result['text'])}; sinks: {result['policy']}",
        *("indexers", "arm", *(heading for heading, _ in MEASURES.values())),
        caption="Mean over seeds or trained files; below it the lowest and the highest",
    )
    groups: dict[tuple[str, str], list[dict]] = {}
    for row in result["rows"]:
        groups.setdefault((row["indexers"], row["arm"]), []).append(row)
    for (kind, arm), rows in groups.items():
        cells = [
            spread([row[name] for row in rows if name in row], form)
            for name, (_, form) in MEASURES.items()
        ]
        view.add_row(kind, arm, *cells, end_section=arm != "stock")
    console.print(view)


def spread(values: list[float], form: str) -> str:
    """The mean and, of several, the lowest and the highest."""
    if not values:
        return ""
    written = form.format(np.mean(values))
    if len(values) == 1:
        return written
    return f"{written}\n{form.format(min(values))}-{form.format(max(values))}"


if __name__ == "__main__":
    sys.exit(main())
