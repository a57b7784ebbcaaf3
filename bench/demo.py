"""The same prompt and seed three times through plain mlx_lm.generate.

    python bench/demo.py

Stock, with MLX_SINKS=1, and dense (indexer off); then what each arm keeps, its
perplexity of a given text past index_topk, and how much its text repeats itself.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

from mlx_lm.tokenizer_utils import load as load_tokenizer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from mlx_sinks.measuring.repetition import repetition
from smollm2.build import TEXT, Recipe, build
from tools.arguments import count, seed
from tools.blas import with_fast_blas
from tools.output import bars, new_bar, new_table
from tools.script import Script

INDEX_TOPK = 128
SPARSE, DENSE = "smollm2-demo", "smollm2-demo-dense"
FOLDERS = {SPARSE: INDEX_TOPK, DENSE: 8192}  # the context length
BLOCK = 100
N = 4
PROMPT = "Explain in detail, step by step, how a lighthouse works and why it is needed."
RULE = "=" * 10  # mlx_lm.generate prints one before the text and one after it
ARMS = {
    "stock": (SPARSE, {}),
    "sinks": (SPARSE, {"MLX_SINKS": "1"}),
    "dense": (DENSE, {}),
}


def main() -> int:
    script = Script(__doc__)
    add = script.add_argument
    add("--build", type=Path, default=Path("build"), help="work folder")
    add("--source", default="index", help="as in build.py")
    add("--prompt", default=PROMPT, help="what to ask")
    add("--max-tokens", type=count, default=300, help="to generate")
    add("--text-tokens", type=count, default=512, help="for perplexity")
    add("--temp", type=float, default=0.8, help="of the sampling")
    add("--seed", type=seed, default=1, help="seed of the sampling")
    options = script.parse_args()
    if options.text_tokens < INDEX_TOPK + 2:
        script.error(f"--text-tokens must go past index_topk {INDEX_TOPK}")
    # Ended by a signal, the processes that were started must end too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return script.report(lambda: run_arms(options), show)


def run_arms(options: argparse.Namespace) -> dict:
    """Generate with each arm, the perplexities beside them on the other core."""
    for folder, index_topk in FOLDERS.items():
        recipe = Recipe(index_topk=index_topk)
        build(options.build / folder, recipe, options.source)
    tokenizer = load_tokenizer(options.build / SPARSE)
    bar = bars(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    # MLX_SINKS_QUIET: the perplexities' own line would be lost among the bars.
    measure = perplexity_command(options.build / SPARSE, options)
    with bar, started(measure, {"MLX_SINKS_QUIET": "1"}) as measuring:
        measuring_task = bar.add_task("perplexity of a text, three arms", total=None)
        arms = {}
        for arm, (folder, variables) in ARMS.items():
            step = new_bar(bar, f"mlx_lm.generate, {arm}", options.max_tokens)
            command = generate_command(options.build / folder, options)
            text = generate(command, variables, step)
            step(options.max_tokens)  # whatever pieces it came in
            ids = tokenizer.encode(text, add_special_tokens=False)
            prefix = "".join(f"{name}={value} " for name, value in variables.items())
            arms[arm] = {
                "command": f"{prefix}{shlex.join(['mlx_lm.generate', *command[1:]])}",
                "text": text,
                "repeated_4_grams": [
                    part.repeated[N] for part in repetition(ids, BLOCK, (N,))
                ],
            }
        output = measuring.stdout.read()
        bar.update(measuring_task, total=1, completed=1)
    measured = json.loads(output)
    kept = {"stock": measured["sinks_kept"], "sinks": 1.0, "dense": None}
    for arm, figures in arms.items():
        figures["sinks_kept"] = kept[arm]
        for name in ("perplexity", "times_dense"):
            figures[name] = measured[name][arm]
    facts = ("index_topk", "tokens", "text", "policy", "versions", "device")
    asked = {name: getattr(options, name) for name in ("prompt", "temp", "seed")}
    return {**{name: measured[name] for name in facts}, **asked, "arms": arms}


def generate_command(folder: Path, options: argparse.Namespace) -> list[str]:
    """The plain upstream command, from the environment that this script runs in."""
    return [
        str(Path(sys.executable).with_name("mlx_lm.generate")),
        f"--model={folder}",
        f"--prompt={options.prompt}",
        f"--max-tokens={options.max_tokens}",
        f"--temp={options.temp}",
        f"--seed={options.seed}",
    ]


def perplexity_command(folder: Path, options: argparse.Namespace) -> list[str]:
    """The figures of perplexity.py for the same folder, in a process of its own."""
    script = Path(__file__).with_name("perplexity.py")
    facts = [f"--model={folder}", f"--text={TEXT}", f"--tokens={options.text_tokens}"]
    return [sys.executable, str(script), *facts, "--probe", "--json"]


def generate(
    command: list[str], variables: dict[str, str], step: Callable[[], None]
) -> str:
    """Run the command as a user would, and return the text between its rules."""
    pieces = []
    with started(command, variables) as process:
        # The command writes about one piece a token.
        while piece := os.read(process.stdout.fileno(), 4096):
            pieces.append(piece)
            step()
    output = b"".join(pieces).decode()
    return output.partition(RULE)[2].rpartition(RULE)[0].strip()


@contextmanager
def started(
    command: list[str], variables: dict[str, str]
) -> Iterator[subprocess.Popen]:
    """A process that ends with the block, however that ends; its failure is raised."""
    environment = {n: v for n, v in os.environ.items() if n != "MLX_SINKS"}
    environment = with_fast_blas({**environment, **variables})
    # Errors go to a file: a pipe would fill up while nobody reads it.
    with TemporaryFile() as errors:
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors
        )
        try:
            yield process
            status = process.wait()
        finally:
            process.terminate()
            process.wait()
        if status:
            errors.seek(0)
            what = f"{shlex.join(command[:2])} failed with status {status}"
            raise RuntimeError(f"{what}\n{errors.read().decode()}")


def show(result: dict, console: Console) -> None:
    for name, arm in result["arms"].items():
        console.rule(name, align="left")
        console.print(f"$ {arm['command']}", markup=False, highlight=False)
        tail = " ".join(arm["text"].split())[-400:]
        console.print(f"… {tail}", markup=False, highlight=False)
    console.rule()
    blocks = max(len(arm["repeated_4_grams"]) for arm in result["arms"].values())
    title = f"index_topk {result['index_topk']}, random indexers; {result['policy']}"
    headings = ("arm", "sinks kept", "perplexity", "x dense")
    repeats = (f"repeats\n{block * BLOCK}+" for block in range(blocks))
    table = new_table(title, *headings, *repeats)
    for name, arm in result["arms"].items():
        kept = arm["sinks_kept"]
        shares = [f"{share:.0%}" for share in arm["repeated_4_grams"]]
        table.add_row(
            name,
            "all" if kept is None else f"{kept:.0%}",
            f"{arm['perplexity']:.1f}",
            f"{arm['times_dense']:.2f}",
            *shares,
            *[""] * (blocks - len(shares)),
        )
    console.print(table)
    console.print(
        f"Perplexity: of {result['text']}, {result['tokens']} tokens, past index_topk. "
        f"Repeats: share of tokens inside a {N}-gram seen before, per {BLOCK} tokens "
        f"generated (temperature {result['temp']}, seed {result['seed']}).",
        highlight=False,
    )


if __name__ == "__main__":
    sys.exit(main())
