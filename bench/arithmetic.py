"""Bytes and operations of learned indexers, a token at a time, by length of context.

    python bench/arithmetic.py

From the models' published configurations, all layers that have an indexer together:

  keys          read once, in bfloat16: what one decode step needs at least
  by heads      the same read once for each head, as a product a head does
  operations    multiplications and additions of queries with keys
  prefill       scores of one layer that stock mlx-lm holds at once, of a step of
                --chunk queries, in bfloat16, before they are summed over heads
  blocks        the same of ours in its default memory on a CPU, or in --score-memory
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass

from rich.console import Console

from tools.arguments import count
from tools.output import new_table
from tools.script import Script

MIB, GIB = 2**20, 2**30
BFLOAT16 = 2


@dataclass(frozen=True)
class Indexers:
    """A model's: layers that have one, heads and width of each."""

    model: str
    layers: int
    heads: int
    width: int = 128


# index_n_heads and index_head_dim of config.json; GLM-5.2's other layers share.
MODELS = (
    Indexers("DeepSeek-V3.2", 61, 64),
    Indexers("GLM-5", 78, 32),
    Indexers("GLM-5.2", 21, 32),
)


def main() -> int:
    script = Script(__doc__)
    add = script.add_argument
    lengths = [2**13, 2**15, 2**17, 2**20]
    add("--keys", type=count, nargs="+", default=lengths, help="tokens of context")
    add("--chunk", type=count, default=2048, help="queries of a prefill step")
    add("--score-memory", type=count, default=32 * MIB, help="bytes")
    options = script.parse_args()
    return script.report(lambda: reckon(options), show)


def reckon(options: argparse.Namespace) -> dict:
    rows = []
    for indexers in MODELS:
        for T in options.keys:
            keys = indexers.layers * T * indexers.width * BFLOAT16
            products = indexers.heads * T
            rows.append(
                {
                    **asdict(indexers),
                    "tokens": T,
                    "key_bytes": keys,
                    "key_bytes_by_heads": keys * indexers.heads,
                    "operations": 2 * indexers.layers * products * indexers.width,
                    "prefill_bytes": options.chunk * products * BFLOAT16,
                    # A query is never cut: float32.
                    "block_bytes": max(options.score_memory, 4 * products),
                }
            )
    return {"chunk": options.chunk, "score_memory": options.score_memory, "rows": rows}


def show(result: dict, console: Console) -> None:
    title = "Learned indexers: one token of decoding, and one step of "
    columns = ("tokens", "keys GiB", "by heads", "GFLOP", "prefill GiB", "blocks MiB")
    view = new_table(f"{title}{result['chunk']:,} queries", "model", *columns)
    for row in result["rows"]:
        view.add_row(
            row["model"],
            f"{row['tokens']:,}",
            f"{row['key_bytes'] / GIB:.2f}",
            f"{row['key_bytes_by_heads'] / GIB:,.1f}",
            f"{row['operations'] / 1e9:,.1f}",
            f"{row['prefill_bytes'] / GIB:,.1f}",
            f"{row['block_bytes'] / MIB:,.0f}",
        )
    console.print(view)


if __name__ == "__main__":
    sys.exit(main())
