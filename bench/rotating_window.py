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
import math
import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import cache as upstream
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import mlx_sinks
from arguments import (
    HelpFormatter,
    add_output,
    add_reading,
    count,
    environment,
    put_out,
    run,
    tokens_to_read,
)
from arms import load_any, rotating_cache
from blas import restart_with_fast_blas
from generation import batch_losses

ARMS = ("full", "stock", "rotating", "sink cache")
# The texts of a batch: where they begin and end in what is read.
BATCH = ((0, 1), (1 / 16, 1), (1 / 8, 0.98), (3 / 16, 0.9))


def main() -> int:
    restart_with_fast_blas()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="folder or hub id")
    add_reading(parser, tokens=2400, window=512)
    add("--chunks", type=count, nargs="+", default=[64, 512, 2048], help="of a step")
    batches = range(len(BATCH) + 1)
    add("--batch", type=int, choices=batches, default=4, help="texts of the batch")
    add("--trust-remote-code", action="store_true", help="as upstream's")
    add_output(parser)
    options = parser.parse_args()
    return run("rotating_window.py", lambda: put_out(measure(options), options, show))


def measure(options: argparse.Namespace) -> dict:
    """Run all arms and return their figures with what is needed to repeat them."""
    window, tokens = options.window, options.tokens
    model, tokenizer = load_any(options.model, options.trust_remote_code)
    caches = arms(model, window, options.sinks)
    ids, source = tokens_to_read(tokenizer, options)
    texts = [ids[int(a * tokens) : int(b * tokens)] for a, b in BATCH[: options.batch]]
    if min(map(len, [ids, *texts])) <= window + 1:
        raise ValueError(f"{tokens} tokens don't go past window {window} in each text")
    alone: list[dict[str, Any]] = []
    together: list[dict[str, Any]] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for chunk in options.chunks:
            row: dict[str, Any] = {"chunk": chunk}
            for arm in ARMS:
                task = progress.add_task(f"{arm}, steps of {chunk}", total=100)
                step = functools.partial(progress.advance, task)
                losses = batch_losses(model, [ids], chunk, step, caches[arm]())
                row[arm] = perplexity_past(losses[0], window)
            alone.append(row)
        rows = {}
        for arm in ARMS if texts else ():
            task = progress.add_task(f"{arm}, batch", total=100)
            step = functools.partial(progress.advance, task)
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
    padded = mx.array([text + [0] * pad for text, pad in zip(texts, padding)])
    losses = []
    for start in range(0, longest, chunk):
        stop = min(start + chunk, longest)
        logits = model(padded[:, start:stop], cache=cache).astype(mx.float32)
        loss = nn.losses.cross_entropy(logits, padded[:, start + 1 : stop + 1])
        losses.append(np.array(loss))
        mx.eval([layer.state for layer in cache])
        step(100 * (stop - start) / longest)
    every = np.concatenate(losses, axis=1)
    return [row[:length] for row, length in zip(every, lengths)]


def perplexity_past(losses: np.ndarray, window: int) -> float:
    """Of the tokens that are predicted where something is evicted already."""
    return math.exp(losses[window:].mean())


def show(result: dict, console: Console) -> None:
    for key, heading, title in (
        ("alone", "chunk", "Perplexity past the window, by tokens of a step"),
        ("batch", "tokens", f"A batch, in steps of {result['batch_chunk']} tokens"),
    ):
        if not result[key]:
            continue
        view = Table(
            title=title,
            caption=f"window {result['window']}, {result['sinks']} sinks, "
            f"{result['text']}",
        )
        for name in (heading, *ARMS, *(f"{arm} / full" for arm in ARMS[1:])):
            view.add_column(name, justify="right")
        for row in result[key]:
            ratios = [f"{row[arm] / row['full']:.3f}" for arm in ARMS[1:]]
            figures = [f"{row[arm]:.2f}" for arm in ARMS]
            view.add_row(str(row[heading]), *figures, *ratios)
        console.print(view)


if __name__ == "__main__":
    sys.exit(main())
