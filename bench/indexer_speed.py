"""Score, force and select: upstream's indexer beside ours, in one process.

    python bench/indexer_speed.py --out build/indexer_speed

Upstream's own ``Indexer`` with its projections replaced by what they would return, so
that only the step itself is timed, in turns:

  upstream  stock mlx-lm
  naive     upstream's arithmetic with the guarantee: MLX_SINKS="scoring=upstream"
  free      ours with nothing forced
  ours      ours with the guarantee

Ratios are medians of the rounds' own. "guarantee" is ours over free, measured apart on
several draws of inputs, since a search for the best columns has more or less luck
with its pivots, and "control" is free over itself in the same turns: the noise. Memory
is the peak above the inputs. Recall is the share of the true best columns (float64,
NumPy, of the same inputs) in a selection with nothing forced. "whole" is the ratio of
whole Indexer calls with random weights of GLM-5's (32 heads) or DeepSeek-V3.2's width.
The floor is what the hardware needs: keys read once, or the products at the rate of a
large matrix product. On Linux an OpenBLAS is preloaded where there is one;
``LD_PRELOAD=`` before the command keeps the wheel's own.

Finished cases are kept in --out: a run that was interrupted goes on there.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache
from mlx_lm.models.deepseek_v32 import Indexer, ModelArgs
from rich.console import Console

import mlx_sinks
from mlx_sinks import SinkPolicy
from tools.arguments import count, positive, seed
from tools.blas import restart_with_fast_blas
from tools.output import bars, environment, new_table
from tools.parts import finished
from tools.rounds import in_seconds, median, ratio, seconds
from tools.script import Script

D, ROPE = 128, 64
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
# Hidden size and rank of the queries: GLM-5 has 32 heads, DeepSeek-V3.2 has 64.
WIDTHS = {32: (6144, 2048), 64: (7168, 1536)}
LOOKED_AT = 4  # queries whose recall is computed


@dataclass(frozen=True)
class Case:
    """One size: B sequences, H heads, L queries, T keys."""

    B: int
    H: int
    L: int
    T: int
    dtype: str

    def __str__(self):
        return f"B{self.B}-H{self.H}-L{self.L}-T{self.T}-{self.dtype}"

    @property
    def operations(self) -> int:
        return 2 * self.B * self.H * self.L * self.T * D

    @property
    def key_bytes(self) -> int:
        return self.B * self.T * D * DTYPES[self.dtype].size

    @property
    def crashes_upstream(self) -> bool:
        """On a CPU mlx 0.32.4 counts a batch's elements of keys in 32 bits."""
        elements = self.T * D * (self.B * self.H - 1)
        return elements >= 2**31 and mx.default_device() == mx.cpu

    @property
    def upstream_bytes(self) -> int:
        """Of the products before and after their weights."""
        products = self.B * self.H * self.L * self.T
        return 2 * products * DTYPES[self.dtype].size


@dataclass
class Inputs:
    """What the projections return: rotated queries and keys, the heads' weights."""

    case: Case
    queries: mx.array
    keys: mx.array
    weights: mx.array
    mask: mx.array | None
    left_padding: mx.array | None

    @classmethod
    def random(cls, case: Case, number: int) -> Inputs:
        B, H, L, T = case.B, case.H, case.L, case.T
        shapes = (B, H, L, D), (B, 1, T, D), (B, L, H)
        arrays = [
            mx.random.normal(shape, key=key).astype(DTYPES[case.dtype])
            for shape, key in zip(shapes, mx.random.split(mx.random.key(number), 3))
        ]
        # Sequences of a batch are of different lengths; one has no padding.
        padding = mx.arange(B) * (T // 16) if B > 1 else None
        mask = None
        if L > 1 or B > 1:
            columns = mx.arange(T)
            mask = columns <= mx.arange(T - L, T)[:, None]
            if padding is not None:
                mask = mask & (columns >= padding.reshape(B, 1, 1, 1))
        mx.eval(arrays, [part for part in (padding, mask) if part is not None])
        return cls(case, *arrays, mask, padding)


class FilledCache:
    """A cache that holds all the keys already and stays as it is."""

    def __init__(self, inputs: Inputs):
        self.keys = self.values = inputs.keys
        self.offset = inputs.case.T - inputs.case.L
        if inputs.left_padding is not None:
            self.left_padding = inputs.left_padding

    def update_and_fetch(self, keys, values):
        return self.keys, self.keys


def main() -> int:
    restart_with_fast_blas()
    script = Script(__doc__, ", .png and the cases")
    add = script.add_argument
    add("--heads", type=count, nargs="+", default=[32, 64], help="H")
    add("--queries", type=count, nargs="+", default=[1, 8, 512, 2048], help="L")
    lengths = [4096, 8192, 32768, 131072, 2**20]
    add("--keys", type=count, nargs="+", default=lengths, help="T")
    add("--batch", type=count, nargs="+", default=[1, 4], help="B")
    add("--dtype", nargs="+", choices=DTYPES, default=["float32"], help="of inputs")
    add("--index-topk", type=count, default=2048, help="columns to select")
    add("--score-memory", type=count, help="bytes of a block (default: the policy's)")
    add("--seeds", type=seed, nargs="+", default=[0, 1, 2], help="of recall")
    add("--seconds", type=positive, default=3.0, help="of rounds for a case")
    add("--longest", type=positive, default=6.0, help="floor of a case in seconds")
    add("--limit", type=positive, default=10.0, help="GiB of scores upstream may hold")
    add("--draws", type=count, default=30, help="of inputs, for the guarantee's cost")
    options = script.parse_args()
    stopped = "stopped; the same command goes on with the cases that are left"
    return script.report(lambda: speed(options), show, draw, stopped)


def speed(options: argparse.Namespace) -> dict:
    """The figures of every case."""
    sizes = options.dtype, options.batch, options.heads, options.queries, options.keys
    sizes = map(dict.fromkeys, sizes)
    cases = [
        Case(B, H, L, T, dtype)
        for dtype, B, H, L, T in itertools.product(*sizes)
        if T > options.index_topk and T >= L
    ]
    if not cases:
        raise ValueError(
            f"no --keys go past --index-topk {options.index_topk} and reach --queries"
        )
    rates = {dtype: hardware(DTYPES[dtype]) for dtype in options.dtype}
    chosen, left_out = [], []
    for case in cases:
        short = floor_seconds(case, rates[case.dtype]) <= options.longest
        (chosen if short else left_out).append(case)
    rows = []
    chosen.sort(key=lambda case: case.operations)  # what takes long comes last
    with bars() as progress:
        task = progress.add_task("measuring", total=len(chosen))
        for case in chosen:
            progress.update(task, description=str(case))
            row = dict(kept(case, options))
            row["floor_ms"] = 1e3 * floor_seconds(case, rates[case.dtype])
            rows.append(row)
            progress.advance(task)
    rows.sort(key=lambda row: [row[name] for name in ("dtype", *"BHLT")])
    return {
        "index_topk": options.index_topk,
        "score_memory": options.score_memory,
        "blas": blas(),
        "hardware": rates,
        **environment(),
        "left_out": [str(case) for case in left_out],
        "rows": rows,
    }


def blas() -> str:
    return "preloaded" if os.environ.get("LD_PRELOAD") else "mlx's own"


@functools.cache
def code() -> str:
    """What names the package as it is now."""
    files = sorted(Path(mlx_sinks.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(map(Path.read_bytes, files))).hexdigest()


def kept(case: Case, options: argparse.Namespace) -> dict:
    """A case's figures, from an earlier run where they are the same."""
    asked = {
        name: getattr(options, name)
        for name in ("index_topk", "score_memory", "seeds", "draws", "seconds", "limit")
    }
    facts = {**asdict(case), **asked, "blas": blas(), **environment(), "code": code()}
    path = options.out and options.out / f"{case}.json"
    return finished(path, facts, lambda: measure(case, options))


def hardware(dtype: mx.Dtype) -> dict[str, float]:
    """Operations and bytes a second, the best of a few large products."""
    size = 512
    while True:
        a, row = mx.ones((size, size), dtype), mx.ones((1, size), dtype)
        wide = mx.ones((size, 32 * size), dtype)
        mx.eval(a, row, wide)
        products = min(seconds(lambda a=a: a @ a) for _ in range(5))
        reading = min(seconds(lambda a=row, b=wide: a @ b) for _ in range(5))
        rates = {"flops": 2 * size**3 / products, "bandwidth": wide.nbytes / reading}
        if size == 2048 or products > 0.01:
            return rates
        size *= 2


def floor_seconds(case: Case, rates: dict[str, float]) -> float:
    reading = case.key_bytes / rates["bandwidth"]
    return max(reading, case.operations / rates["flops"])


def measure(case: Case, options: argparse.Namespace) -> dict:
    """Times in milliseconds, memory in bytes, and recall of one case."""
    mx.clear_cache()
    policies = {
        "upstream": None,
        "naive": SinkPolicy(scoring="upstream"),
        "free": SinkPolicy(0, 0, score_memory=options.score_memory),
        "ours": SinkPolicy(score_memory=options.score_memory),
    }
    if case.upstream_bytes > options.limit * 2**30 or case.crashes_upstream:
        del policies["upstream"], policies["naive"]
    inputs = Inputs.random(case, options.seeds[0])
    calls = {
        arm: step(inputs, policy, options.index_topk)
        for arm, policy in policies.items()
    }
    peaks = {arm: peak_bytes(call) for arm, call in calls.items()}
    times = in_seconds(calls, options.seconds)
    row: dict[str, Any] = {**asdict(case), "upstream_needs_bytes": case.upstream_bytes}
    row["rounds"] = len(times)
    for arm in policies:
        row[f"{arm}_ms"] = 1e3 * median(times, arm)
        row[f"{arm}_peak_bytes"] = peaks[arm]
    if "upstream" in calls:
        row["ratio"] = ratio(times, "upstream", "ours")
    del inputs, calls
    fitting = round(options.seconds / median(times, "ours"))
    row |= guarantee(case, policies, options, max(1, min(options.draws, fitting)))
    row |= recalls(case, policies, options)
    if case.B == 1 and "upstream" in policies:
        row |= whole(case, options)
    return row


def guarantee(
    case: Case,
    policies: dict[str, SinkPolicy | None],
    options: argparse.Namespace,
    draws: int,
) -> dict[str, float]:
    """What forcing costs: times over those with nothing forced, summed over draws."""
    # Each twice: a processor that has seen a search before is quicker at it.
    totals = dict.fromkeys(("free", "ours", "free again", "ours again"), 0.0)
    for number in range(draws):
        inputs = Inputs.random(case, number)
        calls = {
            arm: step(inputs, policies[arm.split()[0]], options.index_topk)
            for arm in totals
        }
        times = in_seconds(calls, 2 * options.seconds / draws)
        for arm in totals:
            totals[arm] += median(times, arm)
    free, ours, free_again, ours_again = totals.values()
    return {
        "guarantee": (ours + ours_again) / (free + free_again),
        "control": free_again / free,
    }


def step(
    inputs: Inputs, policy: SinkPolicy | None, index_topk: int
) -> Callable[[], mx.array]:
    """One selection of an indexer whose projections cost nothing."""
    case = inputs.case
    indexer = Indexer(arguments(case.H, 64, 64, index_topk))
    queries, keys = inputs.queries, inputs.keys[:, :, -case.L :]
    flat = mx.zeros((case.B, case.L, case.H * D), queries.dtype)
    indexer.wq_b = lambda qr: flat
    indexer.wk = lambda x: keys[:, 0]
    indexer.k_norm = lambda k: k
    indexer.rope = lambda part, offset: queries if part.shape[1] == case.H else keys
    indexer.weights_proj = lambda x: inputs.weights
    if policy is not None:
        mlx_sinks.apply(indexer, policy)
    x = mx.zeros((case.B, case.L, 64), queries.dtype)
    cache = FilledCache(inputs)
    return lambda: indexer(x, x, inputs.mask, cache=cache)


def arguments(H: int, hidden: int, rank: int, index_topk: int) -> ModelArgs:
    return ModelArgs(
        hidden_size=hidden,
        q_lora_rank=rank,
        index_n_heads=H,
        index_head_dim=D,
        index_topk=index_topk,
        qk_rope_head_dim=ROPE,
    )


def peak_bytes(call: Callable[[], mx.array]) -> int:
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(call())
    return mx.get_peak_memory() - before


def recalls(
    case: Case, policies: dict[str, SinkPolicy | None], options: argparse.Namespace
) -> dict[str, float]:
    """Mean share of the true best columns in selections with nothing forced."""
    found: dict[str, list[float]] = {}
    for number in options.seeds:
        inputs = Inputs.random(case, number)
        rng = np.random.default_rng(number)
        places = [
            (rng.integers(case.B), rng.integers(case.L)) for _ in range(LOOKED_AT)
        ]
        for arm in ("upstream", "free"):
            if arm not in policies:
                continue
            columns = step(inputs, policies[arm], options.index_topk)()
            for b, i in places:
                chosen = np.array(columns[int(b), 0, int(i)])
                shares = found.setdefault(f"{arm}_recall", [])
                shares.append(recall(inputs, int(b), int(i), chosen))
    return {name: statistics.mean(shares) for name, shares in found.items()}


def recall(inputs: Inputs, b: int, i: int, chosen: np.ndarray) -> float:
    """Of one query, against float64; equal scores may stand for each other."""

    def exact(array: mx.array) -> np.ndarray:
        return np.array(array.astype(mx.float32)).astype(np.float64)

    case = inputs.case
    last = case.T - case.L + i
    first = 0 if inputs.left_padding is None else int(inputs.left_padding[b])
    queries, weights = exact(inputs.queries[b, :, i]), exact(inputs.weights[b, i])
    scores = np.full(case.T, -np.inf)
    for start in range(first, last + 1, 2**16):
        stop = min(start + 2**16, last + 1)
        products = queries @ exact(inputs.keys[b, 0, start:stop]).T
        scores[start:stop] = weights @ np.maximum(products, 0)
    threshold = np.partition(scores, -len(chosen))[-len(chosen)]
    return float((scores[chosen] >= threshold).mean())


def whole(case: Case, options: argparse.Namespace) -> dict[str, float]:
    """Whole calls with random weights, stock and ours, the newest keys appended."""
    hidden, rank = WIDTHS.get(case.H, WIDTHS[32])
    dtype = DTYPES[case.dtype]
    indexer = Indexer(arguments(case.H, hidden, rank, options.index_topk))
    indexer.set_dtype(dtype)
    x = mx.random.normal((1, case.L, hidden)).astype(dtype)
    qr = mx.random.normal((1, case.L, rank)).astype(dtype)
    inputs = Inputs.random(case, options.seeds[0])
    cache = KVCache()
    cache.update_and_fetch(inputs.keys, inputs.keys)
    mx.eval(indexer.parameters(), x, qr, cache.keys)

    def call(policy: SinkPolicy | None) -> mx.array:
        cache.offset = case.T - case.L
        indexer.sink_policy = policy
        return indexer(x, qr, inputs.mask, cache=cache)

    mlx_sinks.apply(indexer, SinkPolicy())
    arms = {"upstream": None, "ours": SinkPolicy(score_memory=options.score_memory)}
    calls = {arm: lambda policy=policy: call(policy) for arm, policy in arms.items()}
    times = in_seconds(calls, options.seconds)
    figures = {f"whole_{arm}_ms": 1e3 * median(times, arm) for arm in arms}
    return {**figures, "whole_ratio": ratio(times, "upstream", "ours")}


COLUMNS = {
    "upstream": ("{upstream_ms:.2f}",),
    "naive": ("{naive_ms:.2f}",),
    "ours": ("{ours_ms:.2f}",),
    "floor": ("{floor_ms:.2f}",),
    "ratio": ("{ratio:.1f}",),
    "whole": ("{whole_ratio:.1f}",),
    "guarantee": ("{guarantee:.3f}",),
    "control": ("{control:.3f}",),
    "peak MiB": ("{upstream_peak:,.0f}", "{ours_peak:,.0f}"),
    "recall": ("{upstream_recall:.4f}", "{free_recall:.4f}"),
}


def show(result: dict, console: Console) -> None:
    for dtype, rates in result["hardware"].items():
        view = new_table(
            f"Score, force, select: {dtype}, index_topk {result['index_topk']}; "
            "times in ms, pairs are upstream / ours",
            *(*"BHLT", *COLUMNS),
            caption=f"BLAS {result['blas']}: {rates['flops'] / 1e9:.0f} GFLOP/s, "
            f"{rates['bandwidth'] / 1e9:.0f} GB/s",
        )
        for row in result["rows"]:
            if row["dtype"] == dtype:
                sizes = [f"{row[name]:,}" for name in "BHLT"]
                cells = [" / ".join(cells_of(row, forms)) for forms in COLUMNS.values()]
                view.add_row(*sizes, *cells)
        console.print(view)
    if result["left_out"]:
        console.print(f"Left out, beyond --longest: {', '.join(result['left_out'])}")


def cells_of(row: dict, forms: tuple[str, ...]) -> Iterator[str]:
    """Figures of a column; of upstream only where it could run."""
    peaks = {
        arm: row[f"{arm}_peak_bytes"] / 2**20
        for arm in ("upstream", "ours")
        if f"{arm}_peak_bytes" in row
    }
    figures = {**row, **{f"{arm}_peak": peak for arm, peak in peaks.items()}}
    for form in forms:
        with suppress(KeyError):
            yield form.format(**figures)


def draw(result: dict, figure: Any) -> None:
    """Time over keys, log-log: a panel for each number of queries of one sequence."""
    if not (rows := result["rows"]):
        return
    B, dtype = rows[0]["B"], rows[0]["dtype"]
    rows = [row for row in rows if (row["B"], row["dtype"]) == (B, dtype)]
    panels = sorted({row["L"] for row in rows})
    figure.set_size_inches(4 * len(panels), 4.5)
    for axes, L in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        for H, style in zip(sorted({row["H"] for row in rows}), ("-", "--", ":", "-.")):
            for color, arm in enumerate(("upstream", "ours", "floor")):
                points = [
                    (row["T"], row[f"{arm}_ms"])
                    for row in rows
                    if (row["L"], row["H"]) == (L, H) and f"{arm}_ms" in row
                ]
                if points:
                    look = {"color": f"C{color}", "label": f"{arm}, {H} heads"}
                    axes.plot(*zip(*points), style, **look)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("keys")
        axes.set_title(f"{L:,} queries")
    figure.axes[0].set_ylabel(f"milliseconds, {rows[0]['dtype']}")
    figure.axes[-1].legend(fontsize="small")


if __name__ == "__main__":
    sys.exit(main())
