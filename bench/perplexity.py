"""Perplexity of a text, block by block: stock, with the guarantee, dense.

    python bench/perplexity.py --model MODEL --text FILE

Teacher-forced, with the same weights and tokens in one process. Up to index_topk the
arms are one and the same. A block is won by the arm, of stock and sinks, that predicts
it better; the totals are of the tokens predicted from a column >= index_topk. With
--probe stock's selections are looked at too, the mean over layers and positions.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape

import mlx_sinks
from tools.arguments import add_model, add_policy, count
from tools.arms import ARMS, arms, indexers, load
from tools.blas import restart_with_fast_blas
from tools.output import bars, environment, new_bar, new_table
from tools.script import Script
from tools.texts import (
    perplexity,
    perplexity_past,
    probed,
    sha256,
    token_ids,
    token_losses,
)


def main() -> int:
    restart_with_fast_blas()
    script = Script(__doc__)
    add_model(script)
    add = script.add_argument
    add("--text", type=Path, help="default: Python's own manual")
    tokens = "how many to read; default: the whole file, or twice index_topk"
    add("--tokens", type=count, help=tokens)
    add("--block", type=count, default=256, help="tokens of a block")
    add("--chunk", type=count, default=128, help="tokens of a step")
    worst = "tokens to name on which stock loses most against dense"
    add("--worst", type=count, help=worst)
    add("--probe", action="store_true", help="what stock selects, too")
    add_policy(script)
    options = script.parse_args()
    return script.report(lambda: measure(options), show)


def measure(options: argparse.Namespace) -> dict:
    """Run all arms and return their figures with what is needed to repeat them."""
    policy = mlx_sinks.SinkPolicy(options.sinks, options.recency)
    model, tokenizer = load(options.model)
    ids, source = token_ids(tokenizer, options.text)
    index_topk = indexers(model)[0].index_topk
    policy = policy.fit(index_topk)
    tokens = options.tokens or (len(ids) if options.text else 2 * index_topk)
    if len(ids) < tokens:
        raise ValueError(f"{source['text']} has {len(ids)} tokens, not {tokens}")
    if not index_topk + 1 < tokens:
        raise ValueError(f"{tokens} tokens don't go past index_topk {index_topk}")
    ids = ids[:tokens]
    losses, seen = {}, {}
    with bars() as progress:
        for arm, context in arms(model, policy).items():
            step = new_bar(progress, arm)
            read = functools.partial(token_losses, model, ids, options.chunk, step)
            with context():
                if arm == "stock" and options.probe:
                    losses[arm], seen = probed(model, policy, read)
                else:
                    losses[arm] = read()
    return {
        "model": options.model,
        "index_topk": index_topk,
        "tokens": tokens,
        "text": source["text"],
        "sha256": sha256(ids),
        "policy": str(policy),
        **environment(),
        **summary(losses, index_topk, options.block),
        "worst": worst(losses, ids, tokenizer, options.worst or 0),
        **seen,
    }


def summary(losses: dict[str, np.ndarray], index_topk: int, block: int) -> dict:
    """Perplexities of each block and past ``index_topk``, and who won how many."""
    blocks = []
    for start in range(0, len(losses["dense"]), block):
        part = {arm: losses[arm][start : start + block] for arm in ARMS}
        row = {arm: perplexity(part[arm]) for arm in ARMS}
        past = start + len(part["dense"]) > index_topk
        better = None  # where they are equal, or no number
        if past and row["sinks"] < row["stock"]:
            better = "sinks"
        elif past and row["stock"] < row["sinks"]:
            better = "stock"
        blocks.append({"start": start, **row, "won_by": better})
    total = {arm: perplexity_past(losses[arm], index_topk) for arm in ARMS}
    return {
        "predicted": len(losses["dense"]) - index_topk,
        "perplexity": total,
        "times_dense": {arm: total[arm] / total["dense"] for arm in ARMS},
        "wins": {
            arm: sum(row["won_by"] == arm for row in blocks)
            for arm in ("stock", "sinks")
        },
        "blocks": blocks,
    }


def worst(
    losses: dict[str, np.ndarray], ids: list[int], tokenizer: Any, tokens: int
) -> list[dict]:
    """The tokens on which stock loses most against dense, in nats."""
    lost = losses["stock"] - losses["dense"]
    return [
        {
            "position": int(place) + 1,
            "after": tokenizer.decode(ids[max(0, place - 7) : place + 1]),
            "token": tokenizer.decode([ids[place + 1]]),
            **{arm: float(losses[arm][place]) for arm in ARMS},
            "share_of_loss": float(lost[place] / lost.sum())
            if lost.sum() > 0
            else None,
        }
        for place in np.argsort(-lost)[:tokens]
    ]


def show(result: dict, console: Console) -> None:
    view = new_table(
        f"Perplexity of {result['tokens']} tokens of {escape(result['text'])}",
        *("from", *ARMS, "won by"),
        caption=f"{result['predicted']} tokens past index_topk {result['index_topk']}; "
        f"sinks: with {result['policy']}. SHA-256 of ids: {result['sha256'][:16]}…",
    )
    for row in result["blocks"]:
        cells = [f"{row[arm]:.2f}" for arm in ARMS]
        view.add_row(str(row["start"]), *cells, row["won_by"] or "")
    view.add_section()
    total, ratio = result["perplexity"], result["times_dense"]
    cells = [f"{total[arm]:.2f} ({ratio[arm]:.3f}x)" for arm in ARMS]
    wins = "{sinks} sinks, {stock} stock".format(**result["wins"])
    view.add_row("past", *cells, wins)
    console.print(view)
    if result["worst"]:
        headings = ("position", "after", "token", *ARMS, "of the loss")
        view = new_table("Where stock loses most against dense, in nats", *headings)
        for row in result["worst"]:
            words = [repr(row[name])[1:-1] for name in ("after", "token")]
            nats = [f"{row[arm]:.2f}" for arm in ARMS]
            share = row["share_of_loss"]
            of_loss = "" if share is None else f"{share:.0%}"
            cells = [str(row["position"]), *words, *nats, of_loss]
            view.add_row(*map(escape, cells))
        console.print(view)
    if "mass" in result:
        console.print(
            "Stock's selections: {sinks_kept:.1%} of the sinks and {recency_kept:.1%} "
            "of the recency window kept, {mass:.1%} of dense attention covered, "
            "{mass_guaranteed:.1%} with the guarantee; skill {skill:.2f}.".format(
                **result
            ),
            highlight=False,
        )


if __name__ == "__main__":
    sys.exit(main())
