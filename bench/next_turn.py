"""What a server keeps of a compacted prompt, and how soon the next turn answers.

    python bench/next_turn.py --model MODEL

The next turn's prompt is the first one, its answer and a question. Three ways to begin
it, in turn in one process:

  whole prompt  the server stores the prompt's rows before they are compacted, and reads
                the answer and the question: what a fresh server would answer
  compacted     it stores what was compacted, and reads the question alone: another
                answer than a fresh server's
  nothing       it reads everything

Medians over the rounds of the seconds until the first token is known, and the bytes
stored. The text is Python's manual or ``--text``.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path

import mlx.core as mx
from rich.console import Console

import mlx_sinks
from tools.arguments import add_model, count, whole
from tools.arms import load_any
from tools.blas import restart_with_fast_blas
from tools.output import bars, environment, new_bar, new_table
from tools.rounds import in_turn, median, ratio, seconds
from tools.script import Script
from tools.texts import tokens_to_read


def main() -> int:
    restart_with_fast_blas()
    script = Script(__doc__)
    add_model(script)
    add = script.add_argument
    add("--text", type=Path, help="default: Python's own manual")
    add("--skip", type=whole, default=0, help="tokens of the text to leave out first")
    add("--budget", type=count, default=256, help="rows kept of a prompt")
    add("--prompts", type=count, nargs="+", default=[1024, 4096], help="tokens")
    add("--answer", type=count, default=128, help="tokens of the first answer")
    add("--question", type=count, default=32, help="tokens of the second turn")
    add("--rounds", type=count, default=5, help="of each arm")
    options = script.parse_args()
    return script.report(lambda: measure(options), show)


def measure(options: argparse.Namespace) -> dict:
    method = mlx_sinks.SnapKV(options.budget).check_room()
    model, tokenizer = load_any(options.model)
    longest = max(options.prompts) + options.answer + options.question
    ids, source = tokens_to_read(tokenizer, options.text, longest, options.skip)
    rows = []
    with bars() as progress:
        for prompt in options.prompts:
            step = new_bar(
                progress, f"{prompt} tokens", (1 + options.rounds) * len(ARMS)
            )
            rows += turn(model, ids, prompt, method, options, step)
    return {
        "model": options.model,
        "budget": options.budget,
        "answer": options.answer,
        "question": options.question,
        **source,
        **environment(),
        "rows": rows,
    }


ARMS = ("whole prompt", "compacted", "nothing")


def turn(model, ids, prompt, method, options, step) -> list[dict]:
    """Seconds to the second turn's first token, and the bytes stored for it."""
    answered = prompt + options.answer
    everything = mlx_sinks.SnapKV(answered)
    compacted = mlx_sinks.compact_prompt_cache(model, ids[:prompt], method)
    model(mx.array([ids[prompt:answered]]), cache=compacted)
    stored = {
        "whole prompt": mlx_sinks.compact_prompt_cache(model, ids[:prompt], everything),
        "compacted": compacted,
        "nothing": None,
    }
    known = {"whole prompt": prompt, "compacted": answered, "nothing": 0}
    rest = ids[: answered + options.question]

    def first_token(arm):
        *read, last = rest[known[arm] :]
        caches = copy.deepcopy(stored[arm])
        caches = mlx_sinks.compact_prompt_cache(
            model, read, method, prompt_cache=caches
        )
        return model(mx.array([[last]]), cache=caches)

    arms = {arm: lambda arm=arm: seconds(lambda: first_token(arm)) for arm in ARMS}
    times = in_turn(arms, options.rounds, step)
    return [
        {
            "prompt": prompt,
            "arm": arm,
            "seconds": median(times, arm),
            "ratio": ratio(times, arm, "nothing"),
            "bytes": sum(cache.nbytes for cache in stored[arm] or ()),
        }
        for arm in ARMS
    ]


def show(result: dict, console: Console) -> None:
    headings = ("prompt", "stored", "seconds to the first token", "ratio", "MiB stored")
    title = (
        f"The next turn, budget {result['budget']:,}: an answer of {result['answer']} "
        f"tokens, a question of {result['question']}"
    )
    view = new_table(title, *headings, caption="ratio to reading everything")
    for row in result["rows"]:
        view.add_row(
            f"{row['prompt']:,}" if row["arm"] == ARMS[0] else "",
            row["arm"],
            f"{row['seconds']:.2f}",
            f"{row['ratio']:.2f}",
            f"{row['bytes'] / 2**20:.1f}",
        )
    console.print(view)


if __name__ == "__main__":
    sys.exit(main())
