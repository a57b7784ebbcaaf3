"""Perplexity past a window of tokens: stock's rotating cache, patched, SinkCache, full.

    python bench/rotating_window.py --model MODEL --text FILE

Teacher-forced, with the same weights and tokens in one process, the text cut into steps
of several sizes. The arms, each with a window of the same size:

  full        no window: the model's own cache
  stock       the RotatingKVCache that --max-kv-size stands for, as upstream runs it
  rotating    the same under MLX_SINKS: mlx-lm's make_prompt_cache(model, max_kv_size)
  sink cache  mlx_sinks.make_sink_cache

and then texts of different lengths as one batch, padded on the right as upstream's
BatchGenerator pads prompts. Perplexities are of the tokens predicted past the window.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any

import mlx.nn as nn
import numpy as np
from mlx_lm.models import cache as upstream
from rich.console import Console

import mlx_sinks
from tools.arguments import add_model, add_reading, count
from tools.arms import load_any, rotating_cache
from tools.blas import restart_with_fast_blas
from tools.output import bars, environment, new_bar, new_table
from tools.script import Script
from tools.texts import batch_losses, perplexity_past, tokens_to_read

ARMS = ("full", "stock", "rotating", "sink cache")
# The texts of a batch: where they begin and end in what is read.
BATCH = ((0, 1), (1 / 16, 1), (1 / 8, 0.98), (3 / 16, 0.9))


def main() -> int:
    restart_with_fast_blas()
    script = Script(__doc__)
    add_model(script)
    add_reading(script, tokens=2400, window=512)
    add = script.add_argument
    add("--chunks", type=count, nargs="+", default=[64, 512, 2048], help="of a step")
    batches = range(len(BATCH) + 1)
    add("--batch", type=int, choices=batches, default=4, help="texts of the batch")
    options = script.parse_args()
    return script.report(lambda: measure(options), show)


def measure(options: argparse.Namespace) -> dict:
    """Run all arms and return their figures with what is needed to repeat them."""
    window, tokens = options.window, options.tokens
    model, tokenizer = load_any(options.model)
    caches = arms(model, window, options.sinks)
    ids, source = tokens_to_read(tokenizer, options.text, tokens, options.skip)
    texts = [ids[int(a * tokens) : int(b * tokens)] for a, b in BATCH[: options.batch]]
    if min(map(len, [ids, *texts])) <= window + 1:
        raise ValueError(f"{tokens} tokens don't go past window {window} in each text")
    alone: list[dict[str, Any]] = []
    together: list[dict[str, Any]] = []
    with bars() as progress:
        for chunk in options.chunks:
            row: dict[str, Any] = {"chunk": chunk}
            for arm in ARMS:
                step = new_bar(progress, f"{arm}, steps of {chunk}")
                losses = batch_losses(model, [ids], chunk, step, caches[arm]())
                row[arm] = perplexity_past(losses[0], window)
            alone.append(row)
        rows = {}
        for arm in ARMS if texts else ():
            step = new_bar(progress, f"{arm}, batch")
            rows[arm] = ragged_losses(
                model, texts, options.chunks[0], caches[arm], step
            )
        for number, text in enumerate(texts):
            figures = {arm: perplexity_past(rows[arm][number], window) for arm in ARMS}
            together.append({"tokens": len(text), **figures})
    return {
        "model": options.model,
        **source,
        "window": window,
        "sinks": options.sinks,
        **environment(),
        "alone": alone,
        "batch_chunk": options.chunks[0],
        "batch": together,
    }


def arms(
    model: nn.Module, window: int, sinks: int
) -> dict[str, Callable[[], list[Any]]]:
    """How each arm makes the cache of one text."""
    policy = mlx_sinks.SinkPolicy(sinks=sinks)
    mlx_sinks.make_sink_cache(model, window, sinks=sinks)  # refuses what can't be

    def rotating():
        mlx_sinks.install(policy, targets=["rotating"])
        return upstream.make_prompt_cache(model, window)

    def unpatched(make):
        def made():
            mlx_sinks.uninstall()
            return make()

        return made

    return {
        "full": unpatched(functools.partial(upstream.make_prompt_cache, model)),
        "stock": unpatched(functools.partial(rotating_cache, model, window, sinks)),
        "rotating": rotating,
        "sink cache": unpatched(
            functools.partial(mlx_sinks.make_sink_cache, model, window, sinks=sinks)
        ),
    }


def ragged_losses(
    model: nn.Module,
    texts: list[list[int]],
    chunk: int,
    make: Callable[[], list[Any]],
    step: Callable[[float], object] = lambda percent: None,
) -> list[np.ndarray]:
    """Negative log-likelihood in nats of each text's tokens after the first.

    One batch, as upstream feeds prompts of different lengths to its caches.
    """
    rows = [make() for _ in texts]
    cache = [layer[0].merge(list(layer)) for layer in zip(*rows)]
    lengths = [len(text) - 1 for text in texts]
    longest = max(lengths)
    padding = [longest - length for length in lengths]
    for layer in cache:
        layer.prepare(lengths=lengths, right_padding=padding)
    padded = [text + [0] * pad for text, pad in zip(texts, padding)]
    losses = batch_losses(model, padded, chunk, step, cache)
    return [row[:length] for row, length in zip(losses, lengths)]


def show(result: dict, console: Console) -> None:
    for key, heading, title in (
        ("alone", "chunk", "Perplexity past the window, by tokens of a step"),
        ("batch", "tokens", f"A batch, in steps of {result['batch_chunk']} tokens"),
    ):
        if not result[key]:
            continue
        view = new_table(
            title,
            *(heading, *ARMS, *(f"{arm} / full" for arm in ARMS[1:])),
            caption=f"window {result['window']}, {result['sinks']} sinks, "
            f"{result['text']}",
        )
        for row in result[key]:
            ratios = [f"{row[arm] / row['full']:.3f}" for arm in ARMS[1:]]
            figures = [f"{row[arm]:.2f}" for arm in ARMS]
            view.add_row(str(row[heading]), *figures, *ratios)
        console.print(view)


if __name__ == "__main__":
    sys.exit(main())
