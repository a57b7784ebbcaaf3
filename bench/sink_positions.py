"""Where a window's keys should stand: absolute, local and mismatched positions, dense.

    python bench/sink_positions.py --model MODEL --text FILE

The same frozen model and tokens in one process, step by step in turn, teacher-forced.
The arms keep the same tokens, four sinks and the newest; they differ in positions:

  dense       no window: the model's own cache
  absolute    keys keep the position that they were read at
  local       distances as if the kept tokens stood side by side (StreamingLLM)
  mismatched  keys moved into the window's places, queries left at their absolute ones

Prompt and window are equally long, so that up to there all arms are one and the same:
the hash of the prompt's logits says whether they were. --chunk 64 and the like read
several tokens a step: rows of a step share one place of the sinks then, in local.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from rich.console import Console

import mlx_sinks
from tools.arguments import add_model, add_reading, count
from tools.arms import load_any
from tools.blas import restart_with_fast_blas
from tools.output import bars, environment, new_bar, new_table
from tools.parts import model_files
from tools.script import Script
from tools.texts import perplexity, tokens_to_read

ARMS = ("dense", "absolute", "local", "mismatched")


class MismatchedCache(mlx_sinks.SinkCache):
    """Keys at their places in the window, under queries at their places in the text."""

    rotations = 0  # its own, not those of the sinks

    def __init__(self, window: int, sinks: int, move: Any):
        super().__init__(window, sinks)
        self.move = move

    def update_and_fetch(self, keys, values):
        keys, values = super().update_and_fetch(keys, values)
        sinks, evictions = self.window.sinks, self.evictions
        if evictions:
            recent = self.move.turn(keys[..., sinks:, :], [-evictions])
            self.rotations += recent.shape[2]
            keys = mx.concatenate([keys[..., :sinks, :], recent], axis=2)
        return keys, values


def main() -> int:
    restart_with_fast_blas()
    script = Script(__doc__, " and .png")
    add_model(script)
    add_reading(script, tokens=2600, window=260)
    add = script.add_argument
    add("--block", type=count, default=256, help="tokens of a block")
    add("--chunk", type=count, default=1, help="tokens of a step past the window")
    add("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="all of them")
    options = script.parse_args()
    return script.report(lambda: positions(options), show, draw)


def positions(options: argparse.Namespace) -> dict:
    """How well each arm predicts the text."""
    window, tokens = options.window, options.tokens
    model, tokenizer = load_any(options.model)
    caches = {arm: make(model, window, options.sinks, arm) for arm in options.arms}
    ids, source = tokens_to_read(tokenizer, options.text, tokens, options.skip)
    if tokens <= window + 1:
        raise ValueError(f"{tokens} tokens don't go past window {window}")
    losses, hashes, seconds = read(model, ids, caches, window, options.chunk)
    blocks = []
    for start in range(window, tokens - 1, options.block):
        stop = min(start + options.block, tokens - 1)
        part = {arm: losses[arm][start - window : stop - window] for arm in caches}
        figures = {arm: perplexity(part[arm]) for arm in caches}
        blocks.append({"start": start, "stop": stop, **figures})
    return {
        "model": options.model,
        "files": model_files(options.model),
        **source,
        "window": window,
        "sinks": options.sinks,
        "chunk": options.chunk,
        **environment(),
        "prefill_logits_sha256": hashes,
        "prefill_equal": len(set(hashes.values())) == 1,
        "perplexity": {arm: perplexity(losses[arm]) for arm in caches},
        "tokens_per_second": {arm: len(losses[arm]) / seconds[arm] for arm in caches},
        "evictions": {
            arm: getattr(cache[0], "evictions", 0) for arm, cache in caches.items()
        },
        "rotations": {
            arm: sum(getattr(layer, "rotations", 0) for layer in cache)
            for arm, cache in caches.items()
        },
        "blocks": blocks,
    }


def make(model: nn.Module, window: int, sinks: int, arm: str) -> list[Any]:
    """One arm's prompt cache."""
    if arm == "dense":
        return make_prompt_cache(model)
    if arm == "mismatched":
        local = make(model, window, sinks, "local")
        return [MismatchedCache(window, sinks, layer.rotation) for layer in local]
    return mlx_sinks.make_sink_cache(model, window, sinks=sinks, position_mode=arm)


def read(
    model: nn.Module,
    ids: list[int],
    caches: dict[str, list[Any]],
    window: int,
    chunk: int,
) -> tuple[dict[str, np.ndarray], dict[str, str], dict[str, float]]:
    """Losses in nats past the window, hashes of the prompt's logits, and seconds."""
    tokens = mx.array([ids])
    losses: dict[str, list] = {arm: [] for arm in caches}
    seconds = dict.fromkeys(caches, 0.0)
    hashes = {}
    with bars() as progress:
        step = new_bar(progress, "reading", len(ids) - 1)
        for arm, cache in caches.items():
            logits = model(tokens[:, :window], cache=cache)
            written = np.array(logits.astype(mx.float32)).tobytes()
            hashes[arm] = hashlib.sha256(written).hexdigest()
        step(window)
        for start in range(window, len(ids) - 1, chunk):
            stop = min(start + chunk, len(ids) - 1)
            for arm, cache in caches.items():
                begun = time.perf_counter()
                logits = model(tokens[:, start:stop], cache=cache).astype(mx.float32)
                targets = tokens[:, start + 1 : stop + 1]
                loss = nn.losses.cross_entropy(logits, targets)
                mx.eval(loss, [layer.state for layer in cache])
                seconds[arm] += time.perf_counter() - begun
                losses[arm].append(np.array(loss)[0])
            step(stop - start)
    return (
        {arm: np.concatenate(parts) for arm, parts in losses.items()},
        hashes,
        seconds,
    )


def show(result: dict, console: Console) -> None:
    arms = list(result["perplexity"])
    view = new_table(
        "Perplexity after the window fills",
        *("tokens", *arms),
        caption=f"window {result['window']}, {result['sinks']} sinks, "
        f"{result['chunk']} tokens a step, {result['text']}",
    )
    for block in result["blocks"]:
        figures = [f"{block[arm]:.2f}" for arm in arms]
        view.add_row(f"{block['start']}-{block['stop']}", *figures)
    view.add_section()
    for name, heading, digits in (
        ("perplexity", "all", 2),
        ("evictions", "evictions", 0),
        ("rotations", "rotations", 0),
        ("tokens_per_second", "tokens/s", 1),
    ):
        figures = [f"{result[name][arm]:,.{digits}f}" for arm in arms]
        view.add_row(heading, *figures)
    console.print(view)
    equal = "equal" if result["prefill_equal"] else "NOT equal"
    hashes = {value[:12] for value in result["prefill_logits_sha256"].values()}
    console.print(
        f"Logits before the first eviction are {equal}: {', '.join(sorted(hashes))}",
        highlight=False,
    )


def draw(result: dict, figure: Any) -> None:
    """Perplexity of each block, one line per arm."""
    figure.set_size_inches(9, 5)
    axes = figure.subplots()
    middle = [(block["start"] + block["stop"]) / 2 for block in result["blocks"]]
    for arm in result["perplexity"]:
        values = [block[arm] for block in result["blocks"]]
        axes.plot(middle, values, marker="o", label=arm)
    axes.set_yscale("log")
    axes.set_xlabel("tokens read")
    axes.set_ylabel("perplexity of the block")
    axes.set_title(
        f"{result['model']}, window {result['window']}, {result['sinks']} sinks",
        parse_math=False,
    )
    axes.legend()


if __name__ == "__main__":
    sys.exit(main())
