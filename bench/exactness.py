"""Whether two models compute the same: their logits for a text, in steps of any size.

    python bench/exactness.py --model build/smollm2-dsa --reference build/smollm2

For each size of step: the largest difference of a row's logits over its largest logit,
the share of rows whose best token is the same, and both perplexities. Indexers are off:
one that selects leaves the reference's attention on purpose.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from rich.console import Console
from rich.markup import escape

from tools.arguments import add_model, count, whole
from tools.arms import dense, load_any
from tools.blas import restart_with_fast_blas
from tools.output import bars, environment, new_bar, new_table
from tools.script import Script
from tools.texts import difference, logits, perplexity, tokens_to_read


def main() -> int:
    restart_with_fast_blas()
    script = Script(__doc__)
    add_model(script)
    add = script.add_argument
    add("--reference", required=True, help="folder or hub id of the other model")
    add("--text", type=Path, help="default: Python's own manual")
    add("--tokens", type=count, default=2048, help="how many to read")
    add("--skip", type=whole, default=0, help="tokens of the text to leave out first")
    sizes = "tokens of a step; the reference takes the first of these"
    add("--steps", type=count, nargs="+", default=[512, 64, 1], help=sizes)
    options = script.parse_args()
    return script.report(lambda: measure(options), show)


def measure(options: argparse.Namespace) -> dict:
    """Read the text with the reference once, and with the model in all steps."""
    reference, tokenizer = load_any(options.reference)
    reading = options.text, options.tokens, options.skip
    ids, source = tokens_to_read(tokenizer, *reading)
    model, _ = load_any(options.model)
    sizes = [each.args.vocab_size for each in (model, reference)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"vocabularies of {sizes[0]} and {sizes[1]} tokens")
    if options.tokens < 2:
        raise ValueError("--tokens 1: nothing is predicted; read 2 or more")
    rows = []
    with bars() as progress, dense(reference), dense(model):
        step = new_bar(progress, "reference", options.tokens)
        theirs = logits(reference, ids, options.steps[0], step)
        for size in options.steps:
            step = new_bar(progress, f"steps of {size}", options.tokens)
            ours = logits(model, ids, size, step)
            best = [values.argmax(axis=-1) for values in (ours, theirs)]
            rows.append(
                {
                    "step": size,
                    "difference": difference(ours, theirs),
                    "same_token": (best[0] == best[1]).mean().item(),
                    "perplexity": perplexity_of(ours, ids),
                    "reference": perplexity_of(theirs, ids),
                }
            )
    folders = {"model": options.model, "reference": options.reference}
    return {**folders, **source, **environment(), "rows": rows}


def perplexity_of(values: mx.array, ids: list[int]) -> float:
    """Of each token after the first, from the logits (T, V) before it."""
    return perplexity(nn.losses.cross_entropy(values[:-1], mx.array(ids[1:])))


def show(result: dict, console: Console) -> None:
    view = new_table(
        f"{escape(result['model'])} and {escape(result['reference'])}: "
        f"{result['tokens']} tokens of {escape(result['text'])} after {result['skip']}",
        *("step", "difference", "same token", "perplexity", "reference"),
    )
    for row in result["rows"]:
        view.add_row(
            str(row["step"]),
            f"{row['difference']:.1e}",
            f"{row['same_token']:.2%}",
            f"{row['perplexity']:.4f}",
            f"{row['reference']:.4f}",
        )
    console.print(view)


if __name__ == "__main__":
    sys.exit(main())
