"""Ways to find the best index_topk of T scores, side by side in one process.

    python bench/topk_speed.py

  argpartition  what the selection uses (on a GPU MLX sorts for it)
  argsort       a whole sort
  counting      no sort: the threshold's 32 bits from the highest on, each by counting
                the scores that reach it; then a running sum places those above it

Times are medians over several draws of scores, as an indexer makes them: sums over 32
heads of weighted positive products. The ways take turns, and all must select the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from time import perf_counter

import mlx.core as mx
from rich.console import Console

from tools.arguments import count
from tools.output import bars, environment, new_bar, new_table
from tools.rounds import median, turns
from tools.script import Script

HEADS = 32


def by_argpartition(scores: mx.array, k: int) -> mx.array:
    return mx.argpartition(scores, kth=-k, axis=-1)[..., -k:]


def by_argsort(scores: mx.array, k: int) -> mx.array:
    return mx.argsort(scores, axis=-1)[..., -k:]


def by_counting(scores: mx.array, k: int) -> mx.array:
    bits = scores.view(mx.uint32)
    sign = mx.array(1 << 31, mx.uint32)
    # Unsigned numbers in the order of the floats.
    keys = mx.where(bits >= sign, ~bits, bits | sign)
    threshold = mx.zeros((*keys.shape[:-1], 1), mx.uint32)
    for bit in reversed(range(32)):
        trial = threshold | mx.array(1 << bit, mx.uint32)
        reached = (keys >= trial).sum(axis=-1, keepdims=True)
        threshold = mx.where(reached >= k, trial, threshold)
    above, equal = keys > threshold, keys == threshold
    free = k - above.sum(axis=-1, keepdims=True)
    chosen = above | (equal & (mx.cumsum(equal.astype(mx.int32), axis=-1) <= free))
    # Those that aren't chosen share a place behind the k.
    place = mx.where(chosen, mx.cumsum(chosen.astype(mx.int32), axis=-1) - 1, k)
    columns = mx.broadcast_to(mx.arange(keys.shape[-1], dtype=mx.uint32), keys.shape)
    room = mx.zeros((*keys.shape[:-1], k + 1), mx.uint32)
    return mx.put_along_axis(room, place, columns, axis=-1)[..., :k]


WAYS = {
    "argpartition": by_argpartition,
    "argsort": by_argsort,
    "counting": by_counting,
}


def main() -> int:
    script = Script(__doc__)
    add = script.add_argument
    lengths = [2**13, 2**15, 2**17, 2**20]
    add("--columns", type=count, nargs="+", default=lengths, help="T")
    add("--rows", type=count, nargs="+", default=[1, 8], help="queries at once")
    add("--index-topk", type=count, default=2048, help="columns to select")
    add("--draws", type=count, default=5, help="of scores")
    options = script.parse_args()
    return script.report(lambda: measure(options), show)


def measure(options: argparse.Namespace) -> dict:
    if min(options.columns) <= options.index_topk:
        raise ValueError(f"--columns have to go past --index-topk {options.index_topk}")
    sizes = [(rows, columns) for rows in options.rows for columns in options.columns]
    results = []
    with bars() as progress:
        step = new_bar(progress, "measuring", len(sizes) * (1 + options.draws))
        for rows, columns in sizes:
            times = []
            for draw in range(-1, options.draws):
                scores = random_scores(rows, columns, abs(draw))
                arms = {
                    way: partial(timed, select, scores, options.index_topk)
                    for way, select in WAYS.items()
                }
                # One round a draw: a processor is quicker at scores it has seen.
                found = next(turns(arms, seed=draw))
                for way in WAYS:
                    if not mx.array_equal(found[way][1], found["argpartition"][1]):
                        raise ValueError(f"{way} selects other columns")
                times.append({way: taken for way, (taken, _) in found.items()})
                step()
            del times[0]  # it was to warm up
            medians = {way: 1e3 * median(times, way) for way in WAYS}
            results.append({"rows": rows, "columns": columns, "ms": medians})
    return {"index_topk": options.index_topk, "results": results, **environment()}


def random_scores(rows: int, columns: int, draw: int) -> mx.array:
    keys = mx.random.split(mx.random.key(draw), 2)
    weights = mx.random.normal((rows, HEADS), key=keys[0])
    scores = mx.zeros((rows, columns))
    for head, key in enumerate(mx.random.split(keys[1], HEADS)):
        products = mx.maximum(mx.random.normal((rows, columns), key=key), 0)
        scores = scores + weights[:, head : head + 1] * products
        mx.eval(scores)
    return scores


def timed(
    select: Callable[[mx.array, int], mx.array], scores: mx.array, k: int
) -> tuple[float, mx.array]:
    """Seconds, and the scores that were found, in order: equal ones may be swapped."""
    start = perf_counter()
    columns = select(scores, k)
    mx.eval(columns)
    seconds = perf_counter() - start
    return seconds, mx.sort(mx.take_along_axis(scores, columns, axis=-1), axis=-1)


def show(result: dict, console: Console) -> None:
    title = f"The best {result['index_topk']:,} of T scores, milliseconds"
    view = new_table(title, "rows", "T", *WAYS)
    for row in result["results"]:
        times = [f"{row['ms'][way]:,.2f}" for way in WAYS]
        view.add_row(str(row["rows"]), f"{row['columns']:,}", *times)
    console.print(view)


if __name__ == "__main__":
    sys.exit(main())
