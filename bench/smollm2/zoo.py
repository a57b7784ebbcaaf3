"""Ways in which an indexer is healthy or sick, on SmolLM2-DSA."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from smollm2.build import (
    INDEXER_WEIGHTS,
    TRAINED,
    check_indexers,
    random_indexers,
    trained_indexers,
)
from tools.arguments import count, folder, seed
from tools.arms import load
from tools.output import environment
from tools.parts import model_files
from tools.texts import token_ids

SHARED_BY = 4  # layers


@dataclass(frozen=True)
class Case:
    """One set of indexers.

    Parameters
    ----------
    kind : str
        One of ``KINDS``.
    seed : int
        Of random weights.
    trained : Path, optional
        A file of train_indexer.py, for all kinds but ``random``.
    """

    kind: str
    seed: int = 0
    trained: Path | None = None

    @property
    def sample(self) -> str:
        return f"seed {self.seed}" if self.trained is None else self.trained.stem

    def __str__(self):
        return f"{self.kind}, {self.sample}"

    def digest(self) -> str | None:
        """Of the trained weights, where there are any."""
        if self.trained is None:
            return None
        return hashlib.sha256(self.trained.read_bytes()).hexdigest()


def add_zoo(
    parser: argparse.ArgumentParser, kinds: tuple[str, ...], parts: str
) -> None:
    """Which model and indexers, the text that they are measured on, and the parts."""
    add = parser.add_argument
    add("--model", required=True, help="folder written by build.py")
    names = ", ".join(map(repr, KINDS))
    add(
        "--indexers",
        nargs="+",
        choices=KINDS,
        default=kinds,
        metavar="KIND",
        help=f"of {names}",
    )
    add("--seeds", type=seed, nargs="+", default=[0], help="of random indexers")
    add(
        "--trained",
        type=Path,
        nargs="+",
        default=[TRAINED],
        metavar="FILE",
        help="trained indexers; default: those that are shipped",
    )
    add("--text", type=Path, help="text to predict; default: Python's own manual")
    add("--tokens", type=count, default=1024, help="how many of it to read")
    add("--parts", type=folder, default=parts, help="folder of finished parts")


def cases(kinds: list[str], seeds: list[int], trained: list[Path]) -> list[Case]:
    """A case for each seed where weights are random, else for each trained file."""
    seeds, files = dict.fromkeys(seeds), dict.fromkeys(trained)
    return [
        case
        for kind in kinds
        for case in (
            [Case(kind, seed=seed) for seed in seeds]
            if kind == "random"
            else [Case(kind, trained=file) for file in files]
        )
    ]


def read_text(
    model: str, tokenizer: Any, text: Path | None, tokens: int, index_topk: int
) -> tuple[list[int], dict]:
    """The text's tokens, and what every figure of them depends on."""
    ids, source = token_ids(tokenizer, text)
    if not index_topk + 1 < tokens <= len(ids):
        raise ValueError(
            f"--tokens {tokens} has to go past index_topk {index_topk}, and "
            f"{source['text']} has {len(ids)}"
        )
    # Every case brings its own indexers along.
    base = model_files(model)
    base.pop(INDEXER_WEIGHTS, None)
    facts = {"index_topk": index_topk, "base": base, **source, **environment()}
    return ids[:tokens], facts | {"tokens": tokens}


def load_model(folder: str) -> tuple[nn.Module, TokenizerWrapper]:
    """A model whose indexers can be exchanged."""
    model, tokenizer = load(folder, trust_remote_code=True)
    if not hasattr(model.args, "indexer"):
        raise ValueError(f"{folder} is no folder that smollm2/build.py wrote")
    return model, tokenizer


def make(model: nn.Module, case: Case) -> None:
    """Give every layer of the model a new indexer."""
    for layer in model.layers:
        layer.self_attn.indexer = model.args.indexer()
    KINDS[case.kind](model, case)
    mx.eval(model.parameters())


def _random(model: nn.Module, case: Case) -> None:
    _fill(model, random_indexers(vars(model.args), case.seed))


def _trained(model: nn.Module, case: Case) -> None:
    _fill(model, trained_indexers(case.trained))


def _flipped(model: nn.Module, case: Case) -> None:
    _trained(model, case)
    for layer in model.layers:
        rope = layer.self_attn.indexer.rope
        rope.traditional = not rope.traditional


def _quantised(model: nn.Module, case: Case) -> None:
    _trained(model, case)
    for layer in model.layers:
        nn.quantize(layer.self_attn.indexer, group_size=64, bits=4)


def _shared(model: nn.Module, case: Case) -> None:
    _trained(model, case)
    for number, layer in enumerate(model.layers):
        if number % SHARED_BY == 0:
            leader = layer.self_attn.indexer = Leader(layer.self_attn.indexer)
        else:
            layer.self_attn.indexer = Follower(leader)


KINDS: dict[str, Callable[[nn.Module, Case], None]] = {
    "random": _random,
    "trained": _trained,
    "RoPE flipped": _flipped,
    "4-bit": _quantised,
    "shared by four": _shared,
}


class Leader(nn.Module):
    """An indexer whose selection other layers reuse, as in GLM-5.2."""

    def __init__(self, indexer: nn.Module):
        super().__init__()
        self.own = indexer
        self._columns: list[mx.array | None] = [None]

    @property
    def index_topk(self) -> int:
        return self.own.index_topk

    def __call__(self, x, qr, mask, cache=None):
        self._columns[0] = self.own(x, qr, mask, cache=cache)
        return self._columns[0]


class Follower(nn.Module):
    """A layer without an indexer of its own: it takes the last leader's selection."""

    def __init__(self, leader: Leader):
        super().__init__()
        # Not as a part of this one: it would count as an indexer of this layer.
        self.leader = lambda: leader

    @property
    def index_topk(self) -> int:
        return self.leader().index_topk

    def __call__(self, x, qr, mask, cache=None):
        if cache is not None:
            nothing = mx.zeros((x.shape[0], 1, x.shape[1], 1))
            cache.update_and_fetch(nothing, nothing)
        return self.leader()._columns[0]


def _fill(model: nn.Module, weights: dict[str, mx.array]) -> None:
    parameters = dict(tree_flatten(model.parameters()))
    own = {name: parameters[name] for name in parameters if ".indexer." in name}
    check_indexers(weights, own)
    model.load_weights(list(weights.items()), strict=False)
