"""What a budget of rows costs a prompt: perplexity, passkeys, bytes, decode speed.

    python bench/snapkv_budget.py --model MODEL --text FILE --out FOLDER

Each prompt is read once; copies of its caches are compacted to every budget, in arms:

  guarantee  mlx_sinks.compact_prompt_cache: the sinks before anything else
  old cap    guarantee_sinks=False: at most an eighth of the budget for them
  no sinks   the first tokens forbidden, the budget spent on others
  full       not compacted

The perplexity is that of the text's next tokens, teacher-forced, over several stretches
of the text. A passkey counts where all of its digits would be said, at five depths.
Decode speeds are ratios to the full cache's in the same round. Last, the shortest
prompt is read in steps of several sizes, to see whether the same rows are kept.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from rich.console import Console
from rich.progress import Progress

import mlx_sinks
from tools.arguments import add_model, count, seed, whole
from tools.arms import load_any
from tools.blas import restart_with_fast_blas
from tools.output import bars, environment, new_bar, new_table
from tools.rounds import in_turn, median, ratio, seconds
from tools.script import Script
from tools.texts import batch_losses, sha256, token_ids

SINKS = mlx_sinks.SnapKV(budget=1).sink_tokens
ARMS = ("guarantee", "old cap", "no sinks")
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
DIGITS = 5
PASSKEY = "\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
QUESTION = "\n\nWhat is the pass key? The pass key is"


def main() -> int:
    restart_with_fast_blas()
    script = Script(__doc__, " and .png")
    add_model(script)
    add = script.add_argument
    add("--text", type=Path, help="default: Python's own manual")
    add("--skip", type=whole, default=0, help="tokens of the text to leave out first")
    add("--prompts", type=count, nargs="+", default=[1024, 4096], help="tokens of each")
    add("--budgets", type=count, nargs="+", default=[16, 32, 64, 128, 256, 512])
    add("--tokens", type=count, default=256, help="predicted after each prompt")
    add("--stretches", type=whole, default=4, help="of the text, evenly apart")
    add("--keys", type=whole, default=3, help="passkeys at each depth")
    add("--rounds", type=whole, default=7, help="of decode speed")
    add("--steps", type=count, default=16, help="tokens decoded in a round")
    chunks, said = [1, 64, 512, 2048], "tokens of a step, to be compared"
    add("--chunks", type=count, nargs="*", default=chunks, help=said)
    add("--seed", type=seed, default=0, help="of the passkeys")
    options = script.parse_args()
    return script.report(lambda: measure(options), show, draw)


def measure(options: argparse.Namespace) -> dict:
    """All figures, with what is needed to repeat them."""
    budgets = sorted(set(options.budgets))
    if min(options.prompts) <= max(budgets):
        raise ValueError(
            f"a prompt of {min(options.prompts)} tokens isn't compacted to "
            f"{max(budgets)} rows"
        )
    model, tokenizer = load_any(options.model)
    ids, source = token_ids(tokenizer, options.text)
    ids = ids[options.skip :]
    length = max(options.prompts) + options.tokens
    if len(ids) < length:
        raise ValueError(f"{source['text']} has {len(ids)} tokens there, not {length}")
    last = len(ids) - length
    starts = [
        round(last * n / max(1, options.stretches - 1))
        for n in range(options.stretches)
    ]
    prompts = []
    with bars() as progress:
        for tokens in options.prompts:
            bench = Bench(model, tokenizer, tokens, budgets, options, progress)
            stretches = [ids[start:][: tokens + options.tokens] for start in starts]
            prompts.append(
                {
                    "tokens": tokens,
                    "perplexity": bench.perplexities(stretches),
                    "passkeys": bench.passkeys(ids[starts[0] :][:tokens]),
                    "held": bench.held(ids[:tokens]) if options.rounds else [],
                }
            )
            if tokens == min(options.prompts):
                chunks = bench.by_chunk(ids[:tokens], options.chunks)
    return {
        "model": options.model,
        **source,
        "skip": options.skip,
        "starts": starts,
        "stretches_sha256": sha256([i for s in starts for i in ids[s:][:length]]),
        "predicted": options.tokens,
        "seed": options.seed,
        **environment(),
        "prompts": prompts,
        "chunks": chunks,
    }


@dataclass(frozen=True)
class WithoutSinks(mlx_sinks.SnapKV):
    """Whatever their scores, the first tokens aren't kept."""

    def columns(self, scores):
        kept = mlx_sinks.snapkv_keep_columns(
            scores[..., SINKS:],
            self.budget,
            sink_tokens=0,
            recent_tokens=self.recent_tokens,
        )
        return kept + SINKS


@dataclass
class Bench:
    """The measurements on prompts of one length."""

    model: nn.Module
    tokenizer: Any
    tokens: int
    budgets: list[int]
    options: argparse.Namespace
    progress: Progress

    def by_chunk(self, prompt: list[int], chunks: list[int]) -> list[dict]:
        """Reading in steps of several sizes, beside the largest."""
        rows, budget = [], self.budgets[-1]
        for chunk in sorted(chunks, reverse=True):
            caches = self.read(prompt, f"steps of {chunk}", budget, chunk)
            held = max(cache.size() for cache in caches)
            keys = [np.array(cache.rows()[0].astype(mx.float32)) for cache in caches]
            logits = self.model(mx.array([prompt[-1:]]), cache=caches)
            logits = np.array(logits.astype(mx.float32))
            if not rows:
                first = keys, logits
            # Rounding moves a key by far less than another token's differs.
            near = [
                np.abs(a - b).max(axis=-1) < 0.01 * np.abs(b).max()
                for a, b in zip(keys, first[0])
            ]
            rows.append(
                {
                    "chunk": chunk,
                    "budget": budget,
                    "tokens": len(prompt) - 1,
                    "rows": held,
                    "same_rows": float(np.mean(near)),
                    "logits_differ": float(np.abs(logits - first[1]).max()),
                }
            )
        return rows

    def read(
        self,
        prompt: list[int],
        what: str,
        budget: int | None = None,
        chunk: int = 512,
    ) -> list[Any]:
        """Caches of all but a prompt's last token, by default ready to be compacted."""
        task = self.progress.add_task(f"{what}, {self.tokens} tokens", total=None)

        def step(read, total):
            self.progress.update(task, completed=read, total=total)

        caches = mlx_sinks.compact_prompt_cache(
            self.model,
            prompt[:-1],
            budget or len(prompt),
            prefill_step_size=chunk,
            prompt_progress_callback=step,
        )
        self.progress.remove_task(task)
        if caches.skipped_layers:
            layer, reason = next(iter(caches.skipped_layers.items()))
            raise ValueError(f"layer {layer} can't be compacted: {reason}")
        return caches

    def arms(self, caches: list[Any]):
        """Each arm's name, its budget, and a copy of the caches compacted for it."""
        yield "full", None, copy.deepcopy(caches)
        for budget in self.budgets:
            methods = (
                mlx_sinks.SnapKV(budget),
                mlx_sinks.SnapKV(budget, guarantee_sinks=False),
                WithoutSinks(budget),
            )
            for arm, method in zip(ARMS, methods):
                compacted = copy.deepcopy(caches)
                for cache in compacted:
                    cache.compact(method)
                yield arm, budget, compacted

    def perplexities(self, stretches: list[list[int]]) -> list[dict]:
        """Of what follows each prompt; and how many of the sinks are left."""
        losses, sinks = {}, {}
        for stretch in stretches:
            caches = self.read(stretch[: self.tokens], "text")
            first = [cache.rows()[0][..., :SINKS, :] for cache in caches]
            for arm, budget, compacted in self.arms(caches):
                kept = [still_held(*pair) for pair in zip(first, compacted)]
                sinks.setdefault((arm, budget), []).append(np.mean(kept))
                rest = stretch[self.tokens - 1 :]
                loss = batch_losses(self.model, [rest], len(rest), cache=compacted)
                losses.setdefault((arm, budget), []).append(loss.mean())
        full = losses.get(("full", None), [])
        return [
            {
                "arm": arm,
                "budget": budget,
                "perplexity": math.exp(np.mean(means)),
                "times_full": math.exp(np.mean(means) - np.mean(full)),
                "each_times_full": np.exp(np.subtract(means, full)).tolist(),
                "sinks_kept": float(np.mean(sinks[arm, budget])),
            }
            for (arm, budget), means in losses.items()
        ]

    def passkeys(self, filler: list[int]) -> list[dict]:
        """For each arm, depth by depth: the share of keys whose digits all come out."""
        dice, said = random.Random(self.options.seed), {}
        question = self.encode(QUESTION)
        for depth in DEPTHS:
            for _ in range(self.options.keys):
                key = "".join(dice.choices("0123456789", k=DIGITS))
                told = self.encode(PASSKEY.format(key=key))
                answer = self.encode(f" {key}")
                rest = filler[: self.tokens - len(told) - len(question)]
                cut = round(depth * len(rest))
                prompt = rest[:cut] + told + rest[cut:] + question
                caches = self.read(prompt, f"passkey at {depth:.0%}")
                for arm, budget, compacted in self.arms(caches):
                    tokens = mx.array([prompt[-1:] + answer])
                    logits = self.model(tokens[:, :-1], cache=compacted)
                    right = mx.argmax(logits, axis=-1) == tokens[:, 1:]
                    depths = said.setdefault((arm, budget), {})
                    depths.setdefault(depth, []).append(right.all().item())
        return [
            {
                "arm": arm,
                "budget": budget,
                "depths": [float(np.mean(depths[depth])) for depth in DEPTHS],
            }
            for (arm, budget), depths in said.items()
        ]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def held(self, prompt: list[int]) -> list[dict]:
        """Bytes after the prompt, and the speed of decoding from there."""
        whole = self.read(prompt, "decode")
        held = {
            budget: compacted
            for arm, budget, compacted in self.arms(whole)
            if arm in ("full", "guarantee")
        }
        bytes_held = {
            budget: sum(sum(array.nbytes for array in c.rows()) for c in caches)
            for budget, caches in held.items()
        }
        token, steps = mx.array([[prompt[-1]]]), self.options.steps

        def decode(caches):
            taken = seconds(lambda: self.model(token, cache=caches), steps)
            for cache in caches:
                cache.trim(steps)
            return 1 / taken

        rounds = self.options.rounds
        step = new_bar(self.progress, "decode", (1 + rounds) * len(held))
        arms = {budget: partial(decode, caches) for budget, caches in held.items()}
        speeds = in_turn(arms, rounds, step)
        return [
            {
                "budget": budget,
                "bytes": bytes_held[budget],
                "times_full_bytes": bytes_held[budget] / bytes_held[None],
                "tokens_per_second": median(speeds, budget),
                "times_full_speed": ratio(speeds, budget, None),
            }
            for budget in held
        ]


def still_held(first: mx.array, cache: Any) -> float:
    """How many of the first keys a cache holds, the mean over its heads."""
    held = cache.rows()[0][..., :SINKS, None, :]
    equal = (first[..., None, :, :] == held).all(axis=-1)
    return equal.any(axis=-2).sum(axis=-1).mean().item()


def show(result: dict, console: Console) -> None:
    for prompt in result["prompts"]:
        show_prompt(result, prompt, console)
    if rows := result["chunks"]:
        view = new_table(
            f"{rows[0]['tokens']:,} tokens in steps, compacted to "
            f"{rows[0]['budget']} rows",
            *("step", "rows held", "same rows", "logits differ by"),
            caption=f"beside steps of {rows[0]['chunk']:,}",
        )
        for row in rows:
            view.add_row(
                f"{row['chunk']:,}",
                str(row["rows"]),
                f"{row['same_rows']:.6f}",
                f"{row['logits_differ']:.1e}",
            )
        console.print(view)


def show_prompt(result: dict, prompt: dict, console: Console) -> None:
    def by_budget(name):
        rows = {}
        for row in prompt[name]:
            rows.setdefault(row["budget"], {})[row.get("arm")] = row
        return rows

    if prompt["perplexity"]:
        show_perplexity(result, prompt, by_budget("perplexity"), console)
    if prompt["passkeys"]:
        headings = ("budget", "arm", *(f"{depth:.0%}" for depth in DEPTHS), "mean")
        caption = "the mean of depths last"
        view = new_table("Passkeys said, by depth", *headings, caption=caption)
        for budget, row in by_budget("passkeys").items():
            for arm, figures in row.items():
                cells = [*figures["depths"], np.mean(figures["depths"])]
                view.add_row(
                    str(budget or "all"), arm, *(f"{cell:.2f}" for cell in cells)
                )
        console.print(view)
    if not prompt["held"]:
        return
    headings = ("budget", "MiB", "of full", "tokens/s", "times full")
    view = new_table("Held after the prompt, and decoding from there", *headings)
    for row in prompt["held"]:
        view.add_row(
            str(row["budget"] or "all"),
            f"{row['bytes'] / 2**20:.2f}",
            f"{row['times_full_bytes']:.3f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['times_full_speed']:.2f}",
        )
    console.print(view)


def show_perplexity(
    result: dict, prompt: dict, perplexity: dict, console: Console
) -> None:
    (full,) = perplexity.pop(None).values()
    view = new_table(
        f"{prompt['tokens']:,} tokens: perplexity of the next "
        f"{result['predicted']}, times the full cache's {full['perplexity']:.2f}",
        *("budget", *ARMS, f"sinks kept, of {SINKS}"),
        caption=f"{len(result['starts'])} stretches of {result['text']}, mean "
        "(lowest-highest)",
    )
    for budget, row in perplexity.items():
        cells = []
        for arm in ARMS:
            each = row[arm]["each_times_full"]
            mean = row[arm]["times_full"]
            cells.append(f"{mean:.3f} ({min(each):.3f}-{max(each):.3f})")
        kept = " / ".join(f"{row[arm]['sinks_kept']:.2f}" for arm in ARMS)
        view.add_row(str(budget), *cells, kept)
    console.print(view)


def draw(result: dict, figure: Any) -> None:
    """Perplexity and passkeys over the budget, a column for each prompt's length."""
    prompts = result["prompts"]
    figure.set_size_inches(5 * len(prompts), 8)
    grid = figure.subplots(2, len(prompts), squeeze=False, sharex=True)
    for column, prompt in enumerate(prompts):
        above, below = grid[:, column]
        for arm in ARMS:
            rows = [row for row in prompt["perplexity"] if row["arm"] == arm]
            budgets = [row["budget"] for row in rows]
            values = [row["times_full"] for row in rows]
            above.plot(budgets, values, marker="o", label=arm)
            said = [row for row in prompt["passkeys"] if row["arm"] == arm]
            means = [np.mean(row["depths"]) for row in said]
            below.plot([row["budget"] for row in said], means, marker="o", label=arm)
        above.set_title(f"{prompt['tokens']:,} tokens")
        above.set_yscale("log")
        above.axhline(1, color="gray", linewidth=1)
        below.set_xscale("log", base=2)
        below.set_xlabel("rows a head")
        above.legend()
    grid[0, 0].set_ylabel("perplexity, times the full cache's")
    grid[1, 0].set_ylabel("passkeys said")
    figure.suptitle(result["model"], parse_math=False)


if __name__ == "__main__":
    sys.exit(main())
