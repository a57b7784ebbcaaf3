"""DSA's attention in steps of several tokens: upstream's way and ours, side by side.

    python bench/attention_speed.py

The module is mlx-lm's DeepseekV32Attention, of GLM-5's or DeepSeek-V3.2's shape, with
random weights and as many keys in its cache as a long context has. Arms, in turn in one
process, at the default memory of a block:

  upstream  expands all keys for each head, and hides those that weren't selected
  absorbed  multiplies absorbed queries by all latents, and hides likewise
  gathered  gathers the latents that each query selected
  chosen    whichever of the three the target sparse_attention takes

The core has narrow projections and a selection that is given. ``--whole`` has the
model's own widths, and its indexer: upstream's in the arm upstream, ours in the others.
Medians over the rounds; the peak is what a call takes beyond what is held before it.
All arms must return the same (but for ``--whole``, where near ties may part). The last
line is the setting for this machine, by the longest step measured.
"""

from __future__ import annotations

import argparse
import sys
from itertools import islice
from time import perf_counter

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import deepseek_v32
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache
from rich.console import Console

import mlx_sinks
from mlx_sinks.patches.patch import upstream_of
from mlx_sinks.sparse.attention import (
    ABSORBED,
    GATHERED,
    UPSTREAM,
    WAYS,
    Shape,
    best_way,
    sparse_forward,
)
from mlx_sinks.sparse.blocks import block_memory
from tools.arguments import count
from tools.blas import restart_with_fast_blas
from tools.output import bars, environment, new_bar, new_table
from tools.rounds import turns
from tools.script import Script

# Each model's attention; heads are an option.
SHAPES = {
    "glm-5": dict(qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256),
    "deepseek-v3.2": dict(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
}
WHOLE = {
    "glm-5": dict(hidden_size=6144, q_lora_rank=2048, index_n_heads=32),
    "deepseek-v3.2": dict(hidden_size=7168, q_lora_rank=1536, index_n_heads=64),
}
NARROW = dict(hidden_size=64, q_lora_rank=64, index_n_heads=1)
ARMS = (*WAYS, "chosen")
FORWARD = upstream_of(deepseek_v32.DeepseekV32Attention.__call__)


def main() -> int:
    restart_with_fast_blas()
    script = Script(__doc__, also=" and its picture")
    add = script.add_argument
    add("--shape", choices=SHAPES, default="glm-5")
    add("--heads", type=count, default=64)
    add("--queries", type=count, nargs="+", default=[4, 64], help="of a step")
    keys = [4096, 8192, 16384, 32768]
    add("--keys", type=count, nargs="+", default=keys, help="after the step")
    add("--index-topk", type=count, default=2048, help="columns selected")
    add("--arms", choices=ARMS, nargs="+", default=ARMS)
    add("--whole", action="store_true", help="with projections and the indexer")
    add("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    add("--rounds", type=count, default=3, help="of each arm")
    add("--seed", type=int, default=0)
    options = script.parse_args()
    if min(options.keys) <= options.index_topk:
        script.error("no step goes past --index-topk: give more --keys")
    return script.report(lambda: measure(options), show, draw)


def measure(options: argparse.Namespace) -> dict:
    mlx_sinks.uninstall()  # whatever the variable asks for
    attention = layer(options)
    rows = []
    with bars() as progress:
        sizes = [(L, T) for L in options.queries for T in options.keys if L <= T]
        total = len(sizes) * (1 + options.rounds) * len(options.arms)
        step = new_bar(progress, "measuring", total)
        for L, T in sizes:
            rows += side_by_side(attention, L, T, options, step)
    return {
        **{name: getattr(options, name) for name in ("shape", "heads", "dtype")},
        "whole": options.whole,
        "index_topk": options.index_topk,
        **environment(),
        "sparse_from": crossover(rows),
        "rows": rows,
    }


def crossover(rows: list[dict]) -> int | None:
    """Keys from which on gathering is fastest in the longest step, if it ever is."""
    longest = max(row["queries"] for row in rows)
    times: dict[int, dict[str, float]] = {}
    for row in rows:
        if row["queries"] == longest and row["arm"] != "chosen":
            times.setdefault(row["keys"], {})[row["arm"]] = row["ms"]
    found = None
    for keys, ms in sorted(times.items(), reverse=True):
        if "gathered" not in ms or min(ms, key=ms.get) != "gathered":
            break
        found = keys
    return found


def layer(options: argparse.Namespace) -> nn.Module:
    """An attention layer with random weights."""
    widths = WHOLE[options.shape] if options.whole else NARROW
    args = deepseek_v32.ModelArgs(
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads,
        kv_lora_rank=512,
        index_head_dim=128,
        index_topk=options.index_topk,
        **SHAPES[options.shape],
        **widths,
    )
    mx.random.seed(options.seed)
    attention = deepseek_v32.DeepseekV32Attention(args)
    attention.set_dtype(getattr(mx, options.dtype))
    attention.eval()
    mx.eval(attention.parameters())
    return attention


class Given:
    """In the place of an indexer: each query gets random columns that it sees."""

    def __init__(self, index_topk: int, L: int, T: int, seed: int):
        self.index_topk = index_topk
        dice = np.random.default_rng(seed)
        drawn = [
            dice.choice(T - L + i + 1, index_topk, replace=False)
            if T - L + i + 1 >= index_topk
            else np.arange(index_topk)
            for i in range(L)
        ]
        self.columns = mx.array(np.stack(drawn).astype(np.uint32))[None, None]

    def __call__(self, x, qr, mask, cache=None):
        keys = x[:, None, :, :1]
        cache.update_and_fetch(keys, keys)
        return self.columns


def side_by_side(attention, L, T, options, step) -> list[dict]:
    """Each arm's time and peak of a step of L queries with T keys after it."""
    dtype = getattr(mx, options.dtype)
    own, keys = KVCache(), KVCache()
    if T > L:
        shape = Shape.of(attention)
        width = attention.indexer.head_dim if options.whole else 1
        random = [
            mx.random.normal((1, 1, T - L, n)).astype(dtype)
            for n in (shape.rank, shape.rope, width)
        ]
        own.update_and_fetch(*random[:2])
        keys.update_and_fetch(random[2], random[2])
    x = mx.random.normal((1, L, attention.hidden_size)).astype(dtype)
    mask = create_attention_mask(x, own, return_array=True)
    if not options.whole:
        attention.indexer = Given(options.index_topk, L, T, options.seed)
    results: dict[str, mx.array] = {}
    cache, memory = [own, keys], block_memory(mlx_sinks.SinkPolicy())

    def call(arm):
        with in_force(arm):
            mx.eval(x, mask, own.state, keys.state)
            mx.clear_cache()
            mx.reset_peak_memory()
            before, start = mx.get_active_memory(), perf_counter()
            if arm in (ABSORBED, GATHERED):
                output = sparse_forward(FORWARD, attention, x, mask, cache, arm, memory)
            else:
                output = attention(x, mask, cache)
            mx.eval(output)
            seconds = perf_counter() - start
            peak = mx.get_peak_memory() - before
            own.trim(L)
            keys.trim(L)
        results[arm] = output
        return {"ms": 1e3 * seconds, "mib": peak / 2**20}

    arms = {arm: lambda arm=arm: call(arm) for arm in options.arms}
    rounds = list(islice(turns(arms, step), 1, 1 + options.rounds))
    if not options.whole:
        same(results)
    chosen = best_way(Shape.of(attention), options.index_topk, L, T)
    return [
        {
            "queries": L,
            "keys": T,
            "arm": arm,
            "way": chosen if arm == "chosen" else arm,
            "ms": float(np.median([each[arm]["ms"] for each in rounds])),
            "mib": float(np.median([each[arm]["mib"] for each in rounds])),
            "times": float(
                np.median([each["upstream"]["ms"] / each[arm]["ms"] for each in rounds])
            )
            if "upstream" in arms
            else None,
        }
        for arm in options.arms
    ]


def in_force(arm: str):
    """The targets that an arm has."""
    targets = {UPSTREAM: [], "chosen": ["dsa", "sparse_attention"]}
    return mlx_sinks.patched(targets=targets.get(arm, ["dsa"]))


def same(results: dict[str, mx.array]) -> None:
    first, *others = results.values()
    scale = mx.abs(first).max()
    for arm, other in zip([*results][1:], others):
        apart = (mx.abs(first - other).max() / scale).item()
        if not apart < (1e-4 if first.dtype == mx.float32 else 0.1):
            raise ValueError(f"{arm} returns something else: {apart:.1e} apart")


def show(result: dict, console: Console) -> None:
    arms = list(dict.fromkeys(row["arm"] for row in result["rows"]))
    what = "The whole module" if result["whole"] else "The core"
    title = f"{what}, {result['shape']}, {result['heads']} heads: ms (MiB)"
    view = new_table(title, "queries", "keys", *arms, "chosen way", "times upstream")
    sizes: dict[tuple[int, int], dict[str, dict]] = {}
    for row in result["rows"]:
        sizes.setdefault((row["queries"], row["keys"]), {})[row["arm"]] = row
    for (queries, keys), row in sizes.items():
        best = row.get("chosen") or min(row.values(), key=lambda each: each["ms"])
        view.add_row(
            f"{queries:,}",
            f"{keys:,}",
            *(f"{row[arm]['ms']:,.0f} ({row[arm]['mib']:,.0f})" for arm in arms),
            best["way"],
            "" if best["times"] is None else f"{best['times']:.1f}",
        )
    console.print(view)
    if result["sparse_from"]:
        console.print(f'MLX_SINKS="sparse_from={result["sparse_from"]}"')


def draw(result: dict, figure) -> None:
    """Time and peak memory of a step against the context, a line an arm."""
    time, memory = figure.subplots(1, 2)
    for queries in dict.fromkeys(row["queries"] for row in result["rows"]):
        for arm in dict.fromkeys(row["arm"] for row in result["rows"]):
            rows = [
                row
                for row in result["rows"]
                if (row["queries"], row["arm"]) == (queries, arm)
            ]
            for axis, name in ((time, "ms"), (memory, "mib")):
                axis.plot(
                    [row["keys"] for row in rows],
                    [row[name] for row in rows],
                    marker="o",
                    label=f"{arm}, {queries} queries",
                )
    for axis, label in ((time, "ms"), (memory, "MiB")):
        axis.set(xscale="log", yscale="log", xlabel="keys", ylabel=label)
    time.legend(fontsize="x-small")


if __name__ == "__main__":
    sys.exit(main())
