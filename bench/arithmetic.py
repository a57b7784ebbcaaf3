"""Bytes and operations of learned indexers and of what they select, by context.

    python bench/arithmetic.py

From the models' published configurations, all layers that have an indexer together:

  keys          read once, in bfloat16: what one decode step needs at least
  by heads      the same read once for each head, as a product a head does
  operations    multiplications and additions of queries with keys
  prefill       scores of one layer that stock mlx-lm holds at once, of a step of
                --chunk queries, in bfloat16, before they are summed over heads
  blocks        the same of ours in its default memory on a CPU, or in --score-memory

And of the attention to what is selected, a query of a step of --chunk, all layers:

  stock, sparse  operations where all keys are expanded and hidden, as stock mlx-lm does
                 in steps of several tokens, and where index_topk latents are gathered
  expanded       one layer's keys and values of all heads, which stock makes in a step
  hidden         one layer's rotary scores of a step, which hold its mask
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass

from rich.console import Console

from mlx_sinks.sparse.attention import GATHERED, UPSTREAM, Shape
from tools.arguments import count
from tools.output import new_table
from tools.script import Script

MIB, GIB = 2**20, 2**30
BFLOAT16 = 2


@dataclass(frozen=True)
class Indexers:
    """A model's: layers that have one, heads and width of each; and its attention."""

    model: str
    layers: int
    heads: int
    attending: int
    attention: Shape
    index_topk: int = 2048
    width: int = 128


# index_n_heads and index_head_dim of config.json; GLM-5.2's other layers share.
MODELS = (
    Indexers("DeepSeek-V3.2", 61, 64, 61, Shape(128, 512, 64, 128, 128)),
    Indexers("GLM-5", 78, 32, 78, Shape(64, 512, 64, 192, 256)),
    Indexers("GLM-5.2", 21, 32, 78, Shape(64, 512, 64, 192, 256)),
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
            shape, heads = indexers.attention, indexers.attention.heads
            by_way = {
                way: 2
                * indexers.attending
                * heads
                * shape.products(way, min(indexers.index_topk, T), options.chunk, T)
                for way in (UPSTREAM, GATHERED)
            }
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
                    "attention_operations": by_way,
                    "expanded_bytes": T
                    * heads
                    * (shape.nope + shape.values)
                    * BFLOAT16,
                    "hidden_bytes": options.chunk * heads * T * BFLOAT16,
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
    columns = ("stock GFLOP", "sparse", "times", "expanded GiB", "hidden GiB")
    view = new_table("Attention, a query of such a step", "model", "tokens", *columns)
    for row in result["rows"]:
        stock, sparse = row["attention_operations"].values()
        view.add_row(
            row["model"],
            f"{row['tokens']:,}",
            f"{stock / 1e9:,.0f}",
            f"{sparse / 1e9:,.0f}",
            f"{stock / sparse:,.1f}",
            f"{row['expanded_bytes'] / GIB:,.1f}",
            f"{row['hidden_bytes'] / GIB:,.1f}",
        )
    console.print(view)


if __name__ == "__main__":
    sys.exit(main())
