"""Ways in which an indexer is healthy or sick, on SmolLM2 as DeepSeek or GLM."""

from __future__ import annotations

import argparse
import hashlib
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

import mlx_sinks
from smollm2.build import Recipe
from smollm2.indexers import TRAINED, flipped
from smollm2.llama import load_llama
from smollm2.mla import mla_weights
from tools.arguments import count, folder, seed
from tools.arms import fast_for_reference_blas
from tools.output import environment
from tools.parts import model_files
from tools.texts import token_ids

KINDS = (
    "random",
    "trained",
    "RoPE flipped",
    "4-bit",
    "shared by four",
    "shared, made up",
)
# GLM-5.2's layers without an indexer: as it was trained to run, and as mlx-lm runs the
# weights that a converter made up for them.
SHARING = {
    "shared by four": {"kind": "glm_moe_dsa", "share": 4},
    "shared, made up": {"kind": "glm_moe_dsa", "share": 4, "made_up": True},
}


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
    def made_up(self) -> bool:
        """Whether some weights are random beside trained ones."""
        return "made_up" in SHARING.get(self.kind, {})

    @property
    def sample(self) -> str:
        return f"seed {self.seed}" if self.trained is None else self.trained.stem

    def __str__(self):
        return f"{self.kind}, {self.sample}"

    def digest(self) -> str | None:
        """Of the trained weights, where there are any, and what is random beside."""
        if self.trained is None:
            return None
        digest = hashlib.sha256(self.trained.read_bytes()).hexdigest()
        return f"{digest} seed {self.seed}" if self.made_up else digest


def add_zoo(
    parser: argparse.ArgumentParser, kinds: tuple[str, ...], parts: str
) -> None:
    """Which model and indexers, the text that they are measured on, and the parts."""
    add = parser.add_argument
    add("--model", required=True, help="a llama: build.py --kind llama writes one")
    add("--index-topk", type=count, default=256, help="columns an indexer selects")
    add(
        "--indexers",
        nargs="+",
        choices=KINDS,
        default=kinds,
        metavar="KIND",
        help=f"of {', '.join(map(repr, KINDS))}",
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
    """A case for each seed where weights are random, else for each trained file.

    What is random beside trained weights has the number of the file as its seed.
    """
    seeds, files = dict.fromkeys(seeds), dict.fromkeys(trained)
    return [
        case
        for kind in kinds
        for case in (
            [Case(kind, seed) for seed in seeds]
            if kind == "random"
            else [Case(kind, number, file) for number, file in enumerate(files)]
        )
    ]


def open_zoo(options: argparse.Namespace) -> tuple[Zoo, Any, list[int], dict]:
    """The model, its tokenizer, the tokens to read, and what figures depend on."""
    for file in options.trained:
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file; train_indexer.py writes it")
    index_topk, tokens = options.index_topk, options.tokens
    llama, tokenizer = load_llama(options.model)
    ids, source = token_ids(tokenizer, options.text)
    if not index_topk + 1 < tokens <= len(ids):
        raise ValueError(
            f"--tokens {tokens} has to go past index_topk {index_topk}, and "
            f"{source['text']} has {len(ids)}"
        )
    base = model_files(options.model)
    facts = {"index_topk": index_topk, "base": base, **source, **environment()}
    zoo = Zoo(llama, index_topk)
    return zoo, tokenizer, ids[:tokens], facts | {"tokens": tokens}


class Zoo:
    """A llama as a DeepSeek or GLM model, to be given indexers."""

    def __init__(self, llama: nn.Module, index_topk: int):
        self.llama, self.index_topk = vars(llama.args), index_topk
        recipe = Recipe(index_topk=index_topk)
        weights = dict(tree_flatten(llama.parameters()))
        weights = mla_weights(weights, recipe.config(self.llama))
        model = self._empty(recipe)
        model.load_weights([*model.sanitize(weights).items()], strict=False)
        fast_for_reference_blas(model)
        self._weights = {
            name: weight
            for name, weight in tree_flatten(model.parameters())
            if ".indexer." not in name
        }

    def make(self, case: Case) -> nn.Module:
        """A model of upstream's own class with a case's indexers."""
        recipe = Recipe(
            index_topk=self.index_topk,
            trained=case.trained,
            seed=case.seed if case.made_up or not case.trained else None,
            **SHARING.get(case.kind, {}),
        )
        config = recipe.config(self.llama)
        weights = recipe.indexers(config)
        if case.kind == "RoPE flipped":
            weights = flipped(config, weights)
        if case.kind == "4-bit":
            weights = {name: in_4_bits(weight) for name, weight in weights.items()}
        return self.model(recipe, weights)

    def model(self, recipe: Recipe, indexers: dict[str, mx.array]) -> nn.Module:
        """A model with these indexers, by their names in it; by default random ones."""
        model = self._empty(recipe)
        weights = self._weights | indexers
        model.load_weights([*weights.items()], strict=bool(indexers))
        mx.eval(model.parameters())
        return model

    def _empty(self, recipe: Recipe) -> nn.Module:
        module = import_module(f"mlx_lm.models.{recipe.kind}")
        shares = recipe.share and not recipe.made_up
        with mlx_sinks.patched(targets=["index_share"] if shares else []):
            args = module.ModelArgs.from_dict(recipe.config(self.llama))
            return module.Model(args).eval()


def in_4_bits(weight: mx.array) -> mx.array:
    """What 4-bit weights stand for; a CPU multiplies these faster."""
    if weight.ndim == 1:
        return weight
    return mx.dequantize(*mx.quantize(weight, bits=4), bits=4)
