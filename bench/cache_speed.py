"""What a window with sinks costs: decode speed and bytes beside stock's caches.

    python bench/cache_speed.py --model MODEL

Two measurements, each with its arms in turn in one process:

  decode  the whole model, one token a step, after twice the window: medians over the
          rounds of tokens per second and of the ratio to stock's RotatingKVCache, and
          the bytes that the caches hold. Earlier keys are random, of the model's own
          shape: speed doesn't depend on them.
  stream  one layer's cache and attention alone, one token a step, up to --stream
          tokens: the time of a step and the bytes held, along the stream.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as upstream
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import mlx_sinks
from arguments import HelpFormatter, add_output, count, environment, put_out, run
from arms import load_any, rotating_cache
from blas import restart_with_fast_blas

ARMS = ("rotating", "absolute", "local", "full")
SEGMENTS = 10


def main() -> int:
    restart_with_fast_blas()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="folder or hub id")
    windows = [512, 1024, 2048, 4096]
    add("--windows", type=count, nargs="+", default=windows, help="tokens kept")
    add("--sinks", type=int, default=4, help="tokens kept for good")
    add("--rounds", type=count, default=15, help="of each arm")
    add("--steps", type=count, default=8, help="of each arm in a round")
    add("--stream", type=count, default=100_000, help="tokens of the stream")
    add("--trust-remote-code", action="store_true", help="as upstream's")
    add_output(parser)
    options = parser.parse_args()
    return run("cache_speed.py", lambda: put_out(measure(options), options, show))


def measure(options: argparse.Namespace) -> dict:
    """Run both measurements."""
    model, _ = load_any(options.model, options.trust_remote_code)
    for window in options.windows:  # what can't be is refused before any work
        mlx_sinks.make_sink_cache(model, window, sinks=options.sinks)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        total = options.rounds * len(ARMS)
        decode = []
        for window in options.windows:
            task = progress.add_task(f"decode, window {window}", total=total)
            caches = filled(model, window, options.sinks)
            decode += decode_speed(model, window, caches, options, task, progress)
        window = options.windows[0]
        task = progress.add_task("stream", total=SEGMENTS * (len(ARMS) - 1))
        step = lambda: progress.advance(task)  # noqa: E731
        stream = stream_speed(model, window, options.sinks, options.stream, step)
    return {
        "model": options.model,
        "sinks": options.sinks,
        **environment(),
        "decode": decode,
        "stream": {"window": window, "rows": stream},
    }


def makers(
    model: nn.Module, window: int, sinks: int
) -> dict[str, Callable[[], list[Any]]]:
    """How each arm makes its caches."""

    def sink_cache(mode):
        return lambda: mlx_sinks.make_sink_cache(
            model, window, sinks=sinks, position_mode=mode
        )

    return {
        "rotating": lambda: rotating_cache(model, window, sinks),
        "absolute": sink_cache("absolute"),
        "local": sink_cache("local"),
        "full": lambda: upstream.make_prompt_cache(model),
    }


def filled(model: nn.Module, window: int, sinks: int) -> dict[str, list[Any]]:
    """Caches that have seen twice the window, and a first token after that."""
    caches = {arm: make() for arm, make in makers(model, window, sinks).items()}
    for cache in caches.values():
        keys, values = random_tokens(model, 2 * window)
        for layer in cache:
            layer.update_and_fetch(keys, values)
        mx.eval(model(mx.array([[0]]), cache=cache), [c.state for c in cache])
    return caches


def random_tokens(model: nn.Module, tokens: int) -> tuple[mx.array, mx.array]:
    """Keys and values of the shape that the model's layers store."""
    cache = upstream.make_prompt_cache(model)
    model(mx.array([[0]]), cache=cache)
    shapes = [(*a.shape[:2], tokens, a.shape[3]) for a in cache[0].state[:2]]
    dtype = cache[0].keys.dtype
    arrays = [mx.random.normal(shape).astype(dtype) for shape in shapes]
    mx.eval(arrays)
    return tuple(arrays)


def decode_speed(model, window, caches, options, task, progress) -> list[dict]:
    """Tokens per second of each arm, and its ratio to stock's in the same round."""
    speeds: dict[str, list[float]] = {arm: [] for arm in caches}
    token = mx.array([[0]])
    for _ in range(options.rounds):
        for arm, cache in caches.items():
            start = perf_counter()
            for _ in range(options.steps):
                mx.eval(model(token, cache=cache))
            speeds[arm].append(options.steps / (perf_counter() - start))
            progress.advance(task)
    return [
        {
            "window": window,
            "arm": arm,
            "tokens_per_second": statistics.median(speeds[arm]),
            "ratio": statistics.median(
                ours / stock for ours, stock in zip(speeds[arm], speeds["rotating"])
            ),
            "bytes": sum(layer.nbytes for layer in caches[arm]),
        }
        for arm in caches
    ]


def stream_speed(
    model: nn.Module, window: int, sinks: int, tokens: int, step: Callable[[], object]
) -> list[dict]:
    """Microseconds a step and bytes held in each part of a stream, for each window."""
    keys, values = random_tokens(model, 1)
    queries, scale = keys, keys.shape[-1] ** -0.5
    rows = []
    layers = {
        arm: make()[0]
        for arm, make in makers(model, window, sinks).items()
        if arm != "full"
    }
    size = max(1, tokens // SEGMENTS)
    for segment in range(SEGMENTS):
        for arm, cache in layers.items():
            mx.reset_peak_memory()
            start = perf_counter()
            for _ in range(size):
                mask = cache.make_mask(1)
                held, vs = cache.update_and_fetch(keys, values)
                mx.eval(
                    mx.fast.scaled_dot_product_attention(
                        queries, held, vs, scale=scale, mask=mask
                    )
                )
            seconds = perf_counter() - start
            rows.append(
                {
                    "arm": arm,
                    "tokens": (segment + 1) * size,
                    "us_a_step": 1e6 * seconds / size,
                    "bytes": cache.nbytes,
                    "peak_bytes": mx.get_peak_memory(),
                    "offset": cache.offset,
                }
            )
            step()
    return rows


def show(result: dict, console: Console) -> None:
    view = Table(title="Decode, the whole model", caption="ratio to stock's rotating")
    for heading in ("window", "arm", "tokens/s", "ratio", "MiB held"):
        view.add_column(heading, justify="left" if heading == "arm" else "right")
    for row in result["decode"]:
        view.add_row(
            f"{row['window']:,}" if row["arm"] == ARMS[0] else "",
            row["arm"],
            f"{row['tokens_per_second']:.2f}",
            f"{row['ratio']:.3f}",
            f"{row['bytes'] / 2**20:.1f}",
        )
    console.print(view)
    stream = result["stream"]
    arms = list(dict.fromkeys(row["arm"] for row in stream["rows"]))
    view = Table(
        title=f"A stream through one layer, window {stream['window']}: "
        "µs a step (KiB held)"
    )
    for heading in ("tokens", *arms):
        view.add_column(heading, justify="right")
    by_length: dict[int, dict[str, dict]] = {}
    for row in stream["rows"]:
        by_length.setdefault(row["tokens"], {})[row["arm"]] = row
    for tokens, row in by_length.items():
        cells = [
            f"{row[arm]['us_a_step']:.0f} ({row[arm]['bytes'] / 1024:.0f})"
            for arm in arms
        ]
        view.add_row(f"{tokens:,}", *cells)
    console.print(view)


if __name__ == "__main__":
    sys.exit(main())
