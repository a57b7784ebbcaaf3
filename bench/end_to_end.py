"""What the plugin costs a generation: tokens per second of prefill and of decoding.

    python bench/end_to_end.py --model MODEL
    python bench/end_to_end.py --glm-layers 2

mlx_lm.generate's own engine (generate_step) on random prompts, greedily. The arms run
in turn in one process, after a round to warm up, on the same weights and tokens:

  stock           upstream's own code
  sinks           patched, with the default policy
  nothing forced  patched, with an empty policy: what the guarantee alone costs

Prefill lasts until the first token, decode from there on. The next turn has --turn
tokens, and lasts until its first one. Speeds and their ratios to
stock in the same round are medians over the rounds; the peak of memory is the highest.
The engine evaluates of a prompt what its caches hold, which the last layer's selection
isn't part of: prefill compares nothing in a model of one layer.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from time import perf_counter
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models import glm_moe_dsa
from mlx_lm.models.cache import make_prompt_cache
from rich.console import Console

import mlx_sinks
from tools.arguments import count, seed
from tools.arms import indexers, load
from tools.blas import restart_with_fast_blas
from tools.output import bars, environment, new_bar, new_table
from tools.rounds import in_turn, median, ratio
from tools.script import Script

ARMS = {
    "stock": nullcontext,
    "sinks": mlx_sinks.patched,
    "nothing forced": lambda: mlx_sinks.patched(mlx_sinks.SinkPolicy(0, 0)),
}
PHASES = ("prefill", "decode", "turn")
SETTINGS = ("tokens", "turn", "rounds", "prefill_step", "seed")
# GLM-5's configuration, but for its vocabulary, its experts and how many layers it has.
GLM = dict(
    vocab_size=1024,
    hidden_size=6144,
    index_head_dim=128,
    index_n_heads=32,
    index_topk=2048,
    indexer_rope_interleave=True,
    intermediate_size=12288,
    num_attention_heads=64,
    kv_lora_rank=512,
    q_lora_rank=2048,
    qk_rope_head_dim=64,
    qk_nope_head_dim=192,
    v_head_dim=256,
    max_position_embeddings=202752,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
)


class Run(NamedTuple):
    """Two turns: tokens per second, bytes, and what was written."""

    prefill: float
    decode: float
    turn: float
    peak_bytes: int
    written: list[int]


def main() -> int:
    restart_with_fast_blas()
    script = Script(__doc__)
    add = script.add_argument
    which = script.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help="folder or hub id")
    layers = "random ones of GLM-5's shape, with a dense MLP each"
    which.add_argument("--glm-layers", type=count, metavar="N", help=layers)
    dtypes = ("float32", "bfloat16")
    add("--dtype", choices=dtypes, help="of --glm-layers (default: float32)")
    lengths = "tokens (default: 1/2, 2 and 4 times index_topk)"
    add("--prompts", type=count, nargs="+", metavar="N", help=lengths)
    add("--tokens", type=count, default=16, help="decoded after the first one")
    add("--turn", type=count, default=64, help="tokens of the next turn")
    add("--rounds", type=count, default=3, help="of each arm")
    add("--prefill-step", type=count, default=512, help="tokens of a prompt at once")
    add("--seed", type=seed, default=0, help="of prompts and random layers")
    options = script.parse_args()
    if options.model is not None and options.dtype:
        script.error("--dtype is for --glm-layers: a checkpoint has its own")
    return script.report(lambda: measure(options), show)


def measure(options: argparse.Namespace) -> dict:
    """Run all arms at all lengths."""
    if options.glm_layers:
        mlx_sinks.uninstall()
        dtype = options.dtype or "float32"
        name = f"GLM-5's shape, random, {dtype}, layers: {options.glm_layers}"
        model = glm(options.glm_layers, getattr(mx, dtype), options.seed)
        mx.eval(model.parameters())
    else:
        name = options.model
        model, _ = load(name)
    index_topk = indexers(model)[0].index_topk
    vocabulary = model(mx.array([[0]])).shape[-1]
    lengths = options.prompts or [index_topk // 2, 2 * index_topk, 4 * index_topk]
    rows = []
    with bars() as progress:
        for length in lengths:
            total = (1 + options.rounds) * len(ARMS)
            step = new_bar(progress, f"{length} tokens", total)
            prompt = mx.random.randint(
                0, vocabulary, (length,), key=mx.random.key(options.seed)
            )
            mx.eval(prompt)
            run = partial(generated, model, prompt, options)
            runs = in_turn(
                {arm: partial(run, arm) for arm in ARMS}, options.rounds, step
            )
            rows += compared(length, runs)
    return {
        "model": name,
        "index_topk": index_topk,
        "weights_bytes": sum(w.nbytes for _, w in tree_flatten(model.parameters())),
        **{name: vars(options)[name] for name in SETTINGS},
        **environment(),
        "rows": rows,
    }


def glm(layers: int, dtype: mx.Dtype, seed: int) -> nn.Module:
    """A random model of GLM-5's layers, with dense MLPs; not evaluated yet."""
    mx.random.seed(seed)
    arguments = glm_moe_dsa.ModelArgs
    without_experts = dict.fromkeys(field.name for field in fields(arguments))
    facts = {**without_experts, **GLM, "num_hidden_layers": layers}
    model = glm_moe_dsa.Model(arguments.from_dict(facts))
    model.set_dtype(dtype)
    return model


def generated(
    model: nn.Module, prompt: mx.array, options: argparse.Namespace, arm: str
) -> Run:
    """Two turns, timed: the first token, which prefill makes, the others, the next."""
    mx.clear_cache()
    mx.reset_peak_memory()
    sizes = {
        "max_tokens": 1 + options.tokens,
        "prefill_step_size": options.prefill_step,
    }
    with ARMS[arm]():
        sizes["prompt_cache"] = make_prompt_cache(model)
        steps = generate_step(prompt, model, **sizes)
        start = perf_counter()
        written = [next(steps)[0]]
        prefilled = perf_counter()
        written += [token for token, _ in steps]
        end = perf_counter()
        # The engine has begun a step more, which isn't to run into the next arm's time.
        with mx.stream(generation_stream):
            mx.synchronize()
        resumed = perf_counter()
        steps = generate_step(prompt[: options.turn], model, **sizes)
        next(steps)
        answered = perf_counter()
        steps.close()
        with mx.stream(generation_stream):
            mx.synchronize()
    speeds = prompt.size / (prefilled - start), options.tokens / (end - prefilled)
    turn = min(options.turn, prompt.size) / (answered - resumed)
    return Run(*speeds, turn, mx.get_peak_memory(), written)


def compared(length: int, rounds: list[dict[str, Run]]) -> list[dict]:
    """A row for each arm, beside stock."""
    rows = []
    for arm in ARMS:
        row = {"prompt": length, "arm": arm}
        for phase in PHASES:
            speeds = [{a: getattr(each[a], phase) for a in ARMS} for each in rounds]
            row[f"{phase}_tokens_per_second"] = median(speeds, arm)
            row[f"{phase}_ratio"] = ratio(speeds, arm, "stock")
        row["peak_bytes"] = max(each[arm].peak_bytes for each in rounds)
        row["same_tokens"] = rounds[0][arm].written == rounds[0]["stock"].written
        rows.append(row)
    return rows


def show(result: dict, console: Console) -> None:
    headings = ("prefill", "ratio", "decode", "ratio", "next turn", "ratio")
    headings += ("peak MiB", "same tokens")
    view = new_table(
        f"Tokens per second, index_topk {result['index_topk']:,}",
        *("prompt", "arm", *headings),
        caption="ratios and tokens: to stock's; memory: with "
        f"{result['weights_bytes'] / 2**20:,.0f} MiB of weights",
    )
    for row in result["rows"]:
        cells = [f"{row['prompt']:,}" if row["arm"] == "stock" else "", row["arm"]]
        for phase in PHASES:
            cells.append(f"{row[f'{phase}_tokens_per_second']:,.2f}")
            cells.append(f"{row[f'{phase}_ratio']:.3f}")
        cells.append(f"{row['peak_bytes'] / 2**20:,.0f}")
        view.add_row(*cells, "yes" if row["same_tokens"] else "no")
    console.print(view)


if __name__ == "__main__":
    sys.exit(main())
