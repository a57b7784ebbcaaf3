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
import sys
from collections.abc import Callable
from itertools import islice
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as upstream
from rich.console import Console

import mlx_sinks
from tools.arguments import add_model, count
from tools.arms import load_any, rotating_cache
from tools.blas import restart_with_fast_blas
from tools.output import bars, environment, new_bar, new_table
from tools.rounds import in_turn, median, ratio, seconds, turns
from tools.script import Script

ARMS = ("rotating", "absolute", "local", "full")
SEGMENTS = 10


def main() -> int:
    restart_with_fast_blas()
    script = Script(__doc__)
    add_model(script)
    add = script.add_argument
    windows = [512, 1024, 2048, 4096]
    add("--windows", type=count, nargs="+", default=windows, help="tokens kept")
    add("--sinks", type=int, default=4, help="tokens kept for good")
    add("--rounds", type=count, default=15, help="of each arm")
    add("--steps", type=count, default=8, help="of each arm in a round")
    add("--stream", type=count, default=100_000, help="tokens of the stream")
    options = script.parse_args()
    return script.report(lambda: measure(options), show)


def measure(options: argparse.Namespace) -> dict:
    """Run both measurements."""
    model, _ = load_any(options.model)
    for window in options.windows:  # what can't be is refused before any work
        mlx_sinks.make_sink_cache(model, window, sinks=options.sinks)
    with bars() as progress:
        total = (1 + options.rounds) * len(ARMS)
        decode = []
        for window in options.windows:
            step = new_bar(progress, f"decode, window {window}", total)
            caches = filled(model, window, options.sinks)
            decode += decode_speed(model, window, caches, options, step)
        window = options.windows[0]
        step = new_bar(progress, "stream", SEGMENTS * (len(ARMS) - 1))
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
    """Each arm's caches, which have seen twice the window."""
    caches = {arm: make() for arm, make in makers(model, window, sinks).items()}
    for cache in caches.values():
        keys, values = random_tokens(model, 2 * window)
        for layer in cache:
            layer.update_and_fetch(keys, values)
        mx.eval([c.state for c in cache])
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


def decode_speed(model, window, caches, options, step) -> list[dict]:
    """Tokens per second of each arm, and its ratio to stock's in the same round."""
    token = mx.array([[0]])

    def decoding(cache):
        return lambda: 1 / seconds(lambda: model(token, cache=cache), options.steps)

    arms = {arm: decoding(cache) for arm, cache in caches.items()}
    speeds = in_turn(arms, options.rounds, step)
    return [
        {
            "window": window,
            "arm": arm,
            "tokens_per_second": median(speeds, arm),
            "ratio": ratio(speeds, arm, "rotating"),
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
    size = max(1, tokens // SEGMENTS)

    def segment(cache):
        def attend():
            mask = cache.make_mask(1)
            held, vs = cache.update_and_fetch(keys, values)
            return mx.fast.scaled_dot_product_attention(
                queries, held, vs, scale=scale, mask=mask
            )

        def run():
            mx.reset_peak_memory()
            return {
                "us_a_step": 1e6 * seconds(attend, size),
                "bytes": cache.nbytes,
                "peak_bytes": mx.get_peak_memory(),
                "offset": cache.offset,
            }

        return run

    arms = {
        arm: segment(make()[0])
        for arm, make in makers(model, window, sinks).items()
        if arm != "full"
    }
    return [
        {"arm": arm, "tokens": number * size, **segments[arm]}
        for number, segments in enumerate(islice(turns(arms, step), SEGMENTS), 1)
        for arm in arms
    ]


def show(result: dict, console: Console) -> None:
    headings = ("window", "arm", "tokens/s", "ratio", "MiB held")
    caption = "ratio to stock's rotating"
    view = new_table("Decode, the whole model", *headings, caption=caption)
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
    title = f"A stream through one layer, window {stream['window']}: "
    view = new_table(f"{title}µs a step (KiB held)", "tokens", *arms)
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
