"""What a window with sinks costs: decode speed and bytes beside stock's caches.

    python bench/cache_speed.py --model MODEL
    python bench/cache_speed.py --model MODEL --draft-model SMALLER

Two measurements or three, each with its arms in turn in one process:

  decode  the whole model, one token a step, after twice the window: medians over the
          rounds of tokens per second and of the ratio to stock's RotatingKVCache, and
          the bytes that the caches hold. Earlier keys are random, of the model's own
          shape: speed doesn't depend on them.
  stream  one layer's cache and attention alone, one token a step, up to --stream
          tokens: the time of a step and the bytes held, along the stream.
  drafts  with a draft model: tokens per second after a prompt of twice the window, the
          repository's story, without drafts and with them, and the share of new tokens
          that were drafts.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from time import perf_counter
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
from tools.texts import token_ids

# By its module: the package has a function of that name.
generate = importlib.import_module("mlx_lm.generate")

ARMS = ("rotating", "absolute", "local", "full")
DRAFTED = ("rotating", "absolute", "full")  # local positions can't be given back
STORY = Path(__file__).parent / "smollm2" / "text.txt"
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
    add("--draft-model", help="a model's folder; its arms run with drafts too")
    add("--drafts", type=count, default=3, help="tokens drafted at a time")
    add("--new-tokens", type=count, default=64, help="written with drafts")
    options = script.parse_args()
    return script.report(lambda: measure(options), show)


def measure(options: argparse.Namespace) -> dict:
    """Run both measurements."""
    model, tokenizer = load_any(options.model)
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
        drafts = []
        if options.draft_model:
            models = model, load_any(options.draft_model)[0]
            total = (1 + options.rounds) * 2 * len(DRAFTED)
            for window in options.windows:
                step = new_bar(progress, f"drafts, window {window}", total)
                drafts += drafted(models, tokenizer, window, options, step)
    return {
        "model": options.model,
        "sinks": options.sinks,
        **environment(),
        "decode": decode,
        "stream": {"window": options.windows[0], "rows": stream},
        "draft_model": options.draft_model,
        "drafts": drafts,
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


def drafted(models, tokenizer, window, options, step) -> list[dict]:
    """Tokens per second with drafts and without, and the share that were drafts."""
    story, _ = token_ids(tokenizer, STORY)
    prompt = mx.array((story * (1 + 2 * window // len(story)))[: 2 * window])
    accepted = {}

    def writing(arm, with_drafts):
        make = [makers(model, window, options.sinks)[arm] for model in models]

        def run():
            more = {"max_tokens": options.new_tokens}
            if with_drafts:
                steps = generate.speculative_generate_step(
                    prompt,
                    *models,
                    num_draft_tokens=options.drafts,
                    prompt_cache=make[0]() + make[1](),
                    **more,
                )
            else:
                steps = generate.generate_step(
                    prompt, models[0], prompt_cache=make[0](), **more
                )
            next(steps)  # the prompt is read
            start = perf_counter()
            rest = [len(each) == 3 and each[2] for each in steps]
            if with_drafts:
                accepted[arm] = sum(rest) / len(rest)
            return len(rest) / (perf_counter() - start)

        return run

    arms = {(arm, way): writing(arm, way) for arm in DRAFTED for way in (False, True)}
    with mlx_sinks.patched(targets=["rotating"]):
        speeds = in_turn(arms, options.rounds, step)
    return [
        {
            "window": window,
            "arm": arm,
            "tokens_per_second": median(speeds, (arm, False)),
            "with_drafts": median(speeds, (arm, True)),
            "ratio": ratio(speeds, (arm, True), (arm, False)),
            "accepted": accepted[arm],
        }
        for arm in DRAFTED
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
    if result["drafts"]:
        headings = ("window", "arm", "tokens/s", "with drafts", "times", "accepted")
        view = new_table(f"Drafts of {result['draft_model']}", *headings)
        for row in result["drafts"]:
            view.add_row(
                f"{row['window']:,}" if row["arm"] == DRAFTED[0] else "",
                row["arm"],
                f"{row['tokens_per_second']:.2f}",
                f"{row['with_drafts']:.2f}",
                f"{row['ratio']:.2f}",
                f"{row['accepted']:.0%}",
            )
        console.print(view)


if __name__ == "__main__":
    sys.exit(main())
