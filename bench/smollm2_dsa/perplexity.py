"""Perplexity past index_topk of SmolLM2-DSA with random indexers, arm by arm.

    python bench/smollm2_dsa/perplexity.py --model build/smollm2-dsa-256 --seeds 0 1 2

Arms, on the same weights and tokens in one process: ``dense`` (indexer off), and for
each seed of the random indexers ``stock`` (upstream's selection) and ``sinks`` (with
the guarantee). Teacher-forced; only tokens predicted from a column >= index_topk count.
"""

from __future__ import annotations

import argparse
import functools
import math
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import mean

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import mlx_sinks
from arguments import HelpFormatter, add_output, count, put_out, seed
from blas import restart_with_fast_blas
from build import random_indexers
from loading import load_folder

TEXT = Path(__file__).with_name("text.txt")
CHUNK = 128


def main() -> int:
    restart_with_fast_blas()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--model", required=True, help="folder written by build.py")
    parser.add_argument("--text", type=Path, default=TEXT, help="plain text to predict")
    parser.add_argument("--tokens", type=count, default=1024, help="length to read")
    parser.add_argument(
        "--seeds",
        type=seed,
        nargs="+",
        default=[0],
        metavar="SEED",
        help="seeds of the random indexers",
    )
    defaults = mlx_sinks.SinkPolicy()
    for name in ("sinks", "recency"):
        default = getattr(defaults, name)
        parser.add_argument(f"--{name}", type=int, default=default, help="to keep")
    add_output(parser)
    options = parser.parse_args()
    try:
        policy = mlx_sinks.SinkPolicy(options.sinks, options.recency)
        seeds = list(dict.fromkeys(options.seeds))
        result = measure(options.model, options.text, options.tokens, seeds, policy)
        put_out(result, options, show)
    except (OSError, ValueError) as error:
        print(f"perplexity.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def measure(
    folder: str,
    text: Path,
    tokens: int,
    seeds: list[int],
    policy: mlx_sinks.SinkPolicy,
) -> dict:
    """Run all arms and return their figures with what is needed to repeat them."""
    model, tokenizer, config = load_folder(folder)
    mlx_sinks.uninstall()  # MLX_SINKS may be set: stock must be stock
    ids = tokenizer.encode(text.read_text())[:tokens]
    index_topk = config["index_topk"]
    if len(ids) < tokens:
        raise ValueError(f"{text} has {len(ids)} tokens, not {tokens}")
    if not index_topk + 1 < tokens:
        raise ValueError(f"--tokens {tokens} doesn't go past index_topk {index_topk}")

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=1 + 2 * len(seeds))

        def run(name: str) -> dict:
            progress.update(task, description=name)
            step = functools.partial(progress.advance, task)
            return score(model, ids, index_topk, step)

        with dense(model):
            rows = [{"arm": "dense", "seed": None, **run("dense")}]
        for seed in seeds:
            model.load_weights(list(random_indexers(config, seed).items()), False)
            for arm, context in (
                ("stock", nullcontext()),
                ("sinks", mlx_sinks.patched(policy)),
            ):
                with context:
                    figures = run(f"{arm}, indexers of seed {seed}")
                rows.append({"arm": arm, "seed": seed, **figures})
    for row in rows:
        row["times_dense"] = row["perplexity"] / rows[0]["perplexity"]
    return {
        "index_topk": index_topk,
        "tokens": tokens,
        "text": text.name,
        "policy": str(policy),
        "versions": {
            name: version(name) for name in ("mlx-sinks", "mlx-lm", "mlx", "numpy")
        },
        "device": f"{mx.default_device()}, {platform.platform()}",
        "rows": rows,
    }


def score(
    model: nn.Module, ids: list[int], index_topk: int, step: Callable[[float], None]
) -> dict:
    """Perplexity of the tokens predicted past ``index_topk``, and the sinks kept.

    ``sinks_kept`` is the share of the first four columns found in a selection, over
    layers and queries; ``None`` where nothing was selected (dense).
    """
    cache = make_prompt_cache(model)
    inputs, targets = mx.array(ids[:-1])[None], mx.array(ids[1:])
    total = inputs.shape[1]
    losses: list[float] = []
    with selections_watched(model) as shares:
        # One cut falls on index_topk: then every selection is of queries past it.
        cuts = [*range(0, index_topk, CHUNK), *range(index_topk, total, CHUNK), total]
        for start, stop in pairwise(cuts):
            hidden = model.model(inputs[:, start:stop], cache)[0]
            if start >= index_topk:
                logits = model.model.embed_tokens.as_linear(hidden)
                losses += nn.losses.cross_entropy(logits, targets[start:stop]).tolist()
            mx.eval(hidden, shares, [c.state for c in cache])
            step((stop - start) / total)
    return {
        "perplexity": math.exp(mean(losses)),
        "predicted": len(losses),
        "sinks_kept": mean(share.item() for share in shares) if shares else None,
    }


@contextmanager
def selections_watched(model: nn.Module) -> Iterator[list[mx.array]]:
    """Collects, for each selection, the share of the first four columns in it."""
    shares: list[mx.array] = []

    def watched(indexer):
        def select(*arguments, **named):
            columns = indexer(*arguments, **named)
            if columns is not None:
                shares.append((columns < 4).sum(axis=-1).mean() / 4)
            return columns

        return select

    indexers = [layer.self_attn.indexer for layer in model.layers]
    for layer, indexer in zip(model.layers, indexers):
        layer.self_attn.indexer = watched(indexer)
    try:
        yield shares
    finally:
        for layer, indexer in zip(model.layers, indexers):
            layer.self_attn.indexer = indexer


@contextmanager
def dense(model: nn.Module) -> Iterator[None]:
    """The model with its indexers off: every column fits."""
    indexers = [layer.self_attn.indexer for layer in model.layers]
    index_topk = indexers[0].index_topk
    for indexer in indexers:
        indexer.index_topk = sys.maxsize
    try:
        yield
    finally:
        for indexer in indexers:
            indexer.index_topk = index_topk


def show(result: dict, console: Console) -> None:
    view = Table(
        title=f"Perplexity past index_topk {result['index_topk']} of "
        f"{result['tokens']} tokens",
        caption=f"sinks: with {result['policy']}",
    )
    for column in ("arm", "indexer seed", "perplexity", "x dense", "sinks kept"):
        view.add_column(column, justify="left" if column == "arm" else "right")
    for row in result["rows"]:
        kept, seed = row["sinks_kept"], row["seed"]
        view.add_row(
            row["arm"],
            "" if seed is None else str(seed),
            f"{row['perplexity']:.2f}",
            f"{row['times_dense']:.2f}",
            "all" if kept is None else f"{kept:.1%}",
        )
    console.print(view)


if __name__ == "__main__":
    sys.exit(main())
