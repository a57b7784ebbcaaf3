"""Where a long generation begins to fall apart: stock, with the guarantee, dense.

    python bench/repetition_profile.py --model MODEL --out build/profile

One greedy text and several sampled ones per arm, with the same weights in one process,
in blocks of tokens. End-of-text tokens are never picked, so that all texts are equally
long. Measures (of mlx_sinks.measuring.repetition, but for the last):

  repeats 4, 8  share of tokens inside a 4-gram (8-gram) that stands earlier in the text
  distinct      distinct tokens of the block over its tokens
  longest run   longest stretch that stands earlier, in tokens
  surprise      perplexity of the text to the dense model: high where it is incoherent,
                low where it repeats itself

Finished parts are kept under --out: a run that was interrupted goes on there.
"""

from __future__ import annotations

import argparse
import functools
import sys
from typing import Any

import numpy as np
from rich.console import Console

import mlx_sinks
from mlx_sinks.measuring.repetition import repetition
from tools.arguments import (
    add_model,
    add_policy,
    count,
    positive,
    seed,
)
from tools.arms import ARMS, arms, dense, indexers, load
from tools.blas import restart_with_fast_blas
from tools.output import bars, environment, new_table
from tools.parts import finished, model_files
from tools.script import Script
from tools.texts import generate, perplexity, sha256, text_losses

PROMPT = "Tell me the history of a small harbour town, from its beginnings until today."
MEASURES = {
    "repeats_4": "repeats 4",
    "repeats_8": "repeats 8",
    "distinct": "distinct",
    "longest_run": "longest run",
    "surprise": "surprise",
}


def main() -> int:
    restart_with_fast_blas()
    script = Script(__doc__, ", .png and the parts")
    add_model(script)
    add = script.add_argument
    add("--prompt", default=PROMPT, help="what to ask")
    add("--tokens", type=count, default=3200, help="of each text, its prompt included")
    past = "instead of --tokens: times the model's index_topk"
    add("--past", type=positive, help=past)
    add("--block", type=count, default=250, help="tokens of a block")
    add("--seeds", type=count, default=3, help="sampled texts of an arm")
    add("--seed", type=seed, default=0, help="of the sampling")
    add("--temp", type=positive, default=0.8, help="of the sampled texts")
    add("--top-p", type=positive, default=0.95, help="of the sampled texts")
    add_policy(script)
    options = script.parse_args()
    stopped = "stopped" if not options.out else "stopped; the same command goes on"
    return script.report(lambda: profile(options), show, draw, stopped)


def profile(options: argparse.Namespace) -> dict:
    """What the texts are like that every arm generates."""
    policy = mlx_sinks.SinkPolicy(options.sinks, options.recency)
    model, tokenizer = load(options.model)
    index_topk = indexers(model)[0].index_topk
    policy = policy.fit(index_topk)
    prompt = tokenizer.encode(options.prompt)
    if tokenizer.chat_template is not None:
        message = {"role": "user", "content": options.prompt}
        prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True)
    if not prompt:
        raise ValueError("the prompt is empty")
    total = int(options.past * index_topk) if options.past else options.tokens
    if total <= max(index_topk, len(prompt)):
        raise ValueError(
            f"{total} tokens don't go past index_topk {index_topk} and the prompt's "
            f"{len(prompt)}"
        )
    length = total - len(prompt)
    facts = {
        "model": options.model,
        "files": model_files(options.model),
        "index_topk": index_topk,
        "total_tokens": total,
        "prompt_tokens": len(prompt),
        "prompt_sha256": sha256(prompt),
        "policy": str(policy),
        "block": options.block,
        **environment(),
    }
    sampled = {"texts": options.seeds, "temp": options.temp, "top_p": options.top_p}
    ways = {"greedy": {"texts": 1}, "sampled": {**sampled, "seed": options.seed}}
    profiles: dict[str, dict[str, Any]] = {}
    with bars() as progress:
        for way, given in ways.items():
            profiles[way] = {"options": given, "arms": {}}
            for arm, context in arms(model, policy).items():
                task = progress.add_task(f"{arm}, {way}", total=length)

                def part(given=given, context=context, task=task) -> dict:
                    step = functools.partial(progress.advance, task)
                    never = sorted(tokenizer.eos_token_ids)
                    with context():
                        texts = generate(
                            model, prompt, length, never=never, step=step, **given
                        )
                    with dense(model):
                        losses = text_losses(model, prompt, texts)
                    blocks = measures(texts, losses, options.block)
                    last = tokenizer.decode(texts[0])[-400:]
                    return {"blocks": blocks, "end_of_first_text": last}

                path = options.out and options.out / f"{way}-{arm}.json"
                known = {**facts, **given, "arm": arm}
                profiles[way]["arms"][arm] = finished(path, known, part)
                progress.update(task, completed=length)
    return {**facts, "profiles": profiles}


def measures(texts: list[list[int]], losses: np.ndarray, block: int) -> list[dict]:
    """For each block the mean over texts and, for several, its standard error."""
    rows = []
    for parts in zip(*(repetition(text, block, (4, 8)) for text in texts)):
        start, stop = parts[0].start, parts[0].start + parts[0].tokens
        values = {
            "repeats_4": [part.repeated[4] for part in parts],
            "repeats_8": [part.repeated[8] for part in parts],
            "distinct": [part.distinct for part in parts],
            "longest_run": [part.longest_run for part in parts],
        }
        row: dict[str, Any] = {"start": start, "stop": stop}
        for name, each in values.items():
            row[name] = float(np.mean(each))
            if len(each) > 1:
                row[f"{name}_error"] = float(np.std(each, ddof=1) / len(each) ** 0.5)
        row["surprise"] = perplexity(losses[:, start:stop])
        rows.append(row)
    return rows


def show(result: dict, console: Console) -> None:
    for way, profiled in result["profiles"].items():
        given = ", ".join(f"{k} {v}" for k, v in profiled["options"].items())
        view = new_table(
            f"{way}: {given}",
            *("measure", "total tokens", *ARMS),
            caption=f"index_topk {result['index_topk']}; sinks: with "
            f"{result['policy']}; ± is the standard error over texts.",
        )
        for name, heading in MEASURES.items():
            rows = zip(*(profiled["arms"][arm]["blocks"] for arm in ARMS))
            for number, row in enumerate(rows):
                first, last = (
                    row[0][end] + result["prompt_tokens"] for end in ("start", "stop")
                )
                past = " past" if last > result["index_topk"] else ""
                cells = [_cell(name, arm) for arm in row]
                label = "" if number else heading
                view.add_row(label, f"{first}-{last}{past}", *cells)
            view.add_section()
        console.print(view)


def _cell(name: str, block: dict) -> str:
    value, error = block[name], block.get(f"{name}_error")
    percent = name.startswith(("repeats", "distinct"))
    written = f"{value:.1%}" if percent else f"{value:.1f}"
    if error is None:
        return written
    return f"{written} ± {100 * error if percent else error:.1f}"


def draw(result: dict, figure: Any) -> None:
    """Repeats and surprise against total tokens, one line per arm."""
    figure.set_size_inches(11, 7)
    title = f"{result['model']}, sinks: {result['policy']}"
    figure.suptitle(title, parse_math=False)
    grid = figure.subplots(2, 2, sharex=True, squeeze=False)
    for column, (way, profiled) in enumerate(result["profiles"].items()):
        for axes, name in zip(grid[:, column], ("repeats_4", "surprise")):
            for arm in ARMS:
                blocks = profiled["arms"][arm]["blocks"]
                middle = [
                    result["prompt_tokens"] + (block["start"] + block["stop"]) / 2
                    for block in blocks
                ]
                axes.errorbar(
                    middle,
                    [block[name] for block in blocks],
                    [block.get(f"{name}_error", 0) for block in blocks],
                    label=arm,
                    marker="o",
                )
            axes.axvline(result["index_topk"], linestyle=":", color="black")
            axes.set_ylabel(MEASURES[name])
        grid[0, column].set_title(way)
        grid[0, column].set_ylim(0, 1)
        grid[1, column].set_yscale("log")
        grid[1, column].yaxis.set_major_formatter("{x:.0f}")
        grid[1, column].yaxis.set_minor_formatter("{x:.1f}")
        grid[1, column].set_xlabel("total tokens; dotted: index_topk")
    grid[0, 0].legend()


if __name__ == "__main__":
    sys.exit(main())
