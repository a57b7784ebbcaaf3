"""Build SmolLM2-135M-Instruct as a checkpoint of DeepSeek-V3.2's or GLM-5's kind.

    python bench/smollm2/build.py --out build/smollm2-dsa
    mlx_lm.generate --model build/smollm2-dsa --prompt "Hello"

Stock mlx-lm loads the folder without any flag. Its attention computes what SmolLM2's
own computes (mla.py says how), and its logits are compared with the llama's before the
folder appears. Added are the indexers: random ones, as a converter makes them up, or
ones that train_indexer.py has distilled.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import mlx.core as mx
from rich.console import Console

from smollm2.indexers import (
    TRAINED,
    indexer_config,
    layer_of,
    random_indexers,
    trained_indexers,
)
from smollm2.llama import WEIGHTS, llama_folder, once, place_of
from smollm2.mla import KINDS, mla_config, mla_weights
from tools.arguments import count, seed
from tools.arms import dense, load_any
from tools.script import HelpFormatter, run
from tools.texts import difference, logits

TEXT = Path(__file__).with_name("text.txt")
INDEXER_WEIGHTS = "model-indexer.safetensors"
INDEX = "model.safetensors.index.json"
# Tokens to compare with the llama, and how many of them one at a time, too.
COMPARED, SINGLE = 40, 4
# The largest difference of a row's logits, over its largest logit.
TOLERANCE = 1e-4
# In config.json: the folders that may be replaced.
WRITTEN_BY = "mlx-sinks bench/smollm2/build.py"


@dataclass(frozen=True)
class Recipe:
    """What to build.

    Parameters
    ----------
    kind : str
        A model type of mlx-lm: one of ``mla.KINDS``, or llama without indexers.
    index_topk : int
        Columns that an indexer selects.
    trained : Path, optional
        A file of train_indexer.py; random indexers without one.
    seed : int
        Of random indexers.
    random_layers : collection of int
        Layers whose indexer is random although there are trained ones.
    share : int, optional
        How many layers in a row select with the first one's indexer, as in GLM-5.2.
    made_up : bool
        Whether the layers that have no indexer get random weights of one all the same.

    Raises
    ------
    ValueError
        Options that don't go together.
    """

    kind: str = "deepseek_v32"
    index_topk: int | None = None
    trained: Path | None = None
    seed: int | None = None
    random_layers: Collection[int] = ()
    share: int | None = None
    made_up: bool = False

    def __post_init__(self):
        given = [
            field.name
            for field in fields(self)
            if field.name != "kind" and getattr(self, field.name) != field.default
        ]
        if self.kind == "llama" and given:
            raise ValueError(
                f"a llama has no indexers: leave out {', '.join(map(_option, given))}, "
                "or say --kind deepseek_v32"
            )
        if self.random_layers and self.trained is None:
            raise ValueError("--random-layers goes with --indexers trained")
        has_random = not self.trained or self.random_layers or self.made_up
        if self.seed is not None and not has_random:
            raise ValueError("--seed is of random indexers: leave it out")
        if self.share and self.kind != "glm_moe_dsa":
            raise ValueError(
                f"a {self.kind} shares no indexers: say --kind glm_moe_dsa"
            )
        if self.share == 1:
            raise ValueError("--share 1 shares nothing: give 2 layers or more")
        if self.made_up and not self.share:
            raise ValueError(
                "--made-up goes with --share: else every layer has its own"
            )

    @property
    def selects(self) -> bool:
        return self.kind != "llama"

    def shares(self, layer: int) -> bool:
        """Whether a layer uses another one's selection."""
        return bool(self.share and layer % self.share)

    def config(self, llama: dict) -> dict:
        """The ``config.json`` of the model, from the llama's."""
        if not self.selects:
            return llama
        config = mla_config(llama, self.kind)
        config |= indexer_config(config, self.index_topk or 256)
        if self.share:
            config["indexer_types"] = [
                "shared" if self.shares(layer) else "full"
                for layer in range(config["num_hidden_layers"])
            ]
        return config

    def indexers(self, config: dict) -> dict[str, mx.array]:
        """The weights of the indexers, by their names in the model."""
        layers = range(config["num_hidden_layers"])
        for layer in self.random_layers:
            if layer not in layers or self.shares(layer):
                has = "is shared" if layer in layers else "isn't there"
                raise ValueError(
                    f"--random-layers: layer {layer} {has}; choose another"
                )
        random = random_indexers(config, self.seed or 0)
        trained = trained_indexers(config, self.trained) if self.trained else {}
        return {
            name: random[name]
            if layer_of(name) in self.random_layers or self.shares(layer_of(name))
            else trained.get(name, random[name])
            for name in random
            if self.made_up or not self.shares(layer_of(name))
        }

    def __str__(self):
        if not self.selects:
            return "a llama, no indexers"
        indexers = f"random seed {self.seed or 0}"
        if self.trained:
            indexers = f"trained {self.trained.stem}"
        if self.random_layers:
            indexers += f", random in layers {', '.join(map(str, self.random_layers))}"
        if self.share:
            indexers += f", one for {self.share} layers"
        return f"{self.kind}, index_topk {self.index_topk or 256}, indexers: {indexers}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder to write")
    source = "'index' (the wheel), or a llama's folder or hub id"
    add("--source", default="index", help=source)
    add("--kind", choices=(*KINDS, "llama"), default=Recipe.kind, help="of model")
    topk = "columns an indexer selects (256); all of a text from 8192 on: dense"
    add("--index-topk", type=count, help=topk)
    indexers = "random, trained (those that are shipped), or train_indexer.py's file"
    add("--indexers", dest="trained", type=trained_file, metavar="WHICH", help=indexers)
    add("--seed", type=seed, help="of random indexers (0)")
    layers = "with trained ones: layers whose indexer is random all the same"
    add("--random-layers", type=int, nargs="+", default=(), metavar="N", help=layers)
    share = "one indexer for N layers in a row, as GLM-5.2 has it"
    add("--share", type=count, metavar="N", help=share)
    made_up = "random weights where a layer shares, as converters make them up"
    add("--made-up", action="store_true", help=made_up)
    options = vars(parser.parse_args())
    out, source = options.pop("out"), options.pop("source")
    return run("build.py", lambda: build(out, Recipe(**options), source))


def trained_file(which: str) -> Path | None:
    """What ``--indexers`` says: a file, or ``None`` for random ones."""
    return {"random": None, "trained": TRAINED}.get(which, Path(which))


def build(out: Path, recipe: Recipe, source: str = "index") -> None:
    """Write the folder ``out``; it appears whole or not at all."""
    console = Console(stderr=True)
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".building-") as scratch:
        folder = Path(scratch, "new")
        with console.status("Converting SmolLM2-135M-Instruct …") as status:
            place = place_of(source, Path(scratch))
            base = llama = llama_folder(source, place, status.update)
            if recipe.selects:
                base = once(
                    place.with_name(f"{place.name}-mla"),
                    partial(convert_llama, llama),
                    status.update,
                )
            status.update(f"Writing {out} …")
            shutil.copytree(base, folder, copy_function=_link_weights)
            config = recipe.config(json.loads((llama / "config.json").read_text()))
            _write(folder / "config.json", {**config, "written_by": WRITTEN_BY})
            if recipe.selects:
                _add_indexers(folder, recipe.indexers(config))
                status.update("Comparing it with the llama …")
                if not (far := far_from(llama, folder)) <= TOLERANCE:  # or no number
                    raise RuntimeError(
                        f"its logits differ from the llama's by {far:.1e} of the "
                        f"largest, not {TOLERANCE:.0e} at most: nothing is written"
                    )
        old = Path(scratch, "old")
        try:
            if out.exists():
                _refuse_to_lose(out, folder)
                out.rename(old)
            folder.rename(out)
        except BaseException:
            if old.exists() and not out.exists():
                old.rename(out)
            raise
    console.print(f"{out.name}: {recipe}", highlight=False, soft_wrap=True)


def convert_llama(llama: Path, folder: Path) -> None:
    """Fill a folder with the weights of ``mla_weights`` and the llama's tokenizer."""
    shutil.copytree(
        llama, folder, ignore=shutil.ignore_patterns(WEIGHTS), dirs_exist_ok=True
    )
    config = mla_config(json.loads((llama / "config.json").read_text()), KINDS[0])
    weights = mla_weights(mx.load(str(llama / WEIGHTS)), config)
    mx.save_safetensors(str(folder / WEIGHTS), weights, {"format": "mlx"})


def far_from(llama: Path, folder: Path) -> float:
    """How much two models' logits for some text differ where nothing is selected.

    In one step of several tokens, and one by one: upstream computes these otherwise.
    """
    theirs, tokenizer = load_any(str(llama))
    ids = tokenizer.encode(TEXT.read_text())[:COMPARED]
    theirs = logits(theirs, ids, len(ids))
    ours, _ = load_any(str(folder))
    with dense(ours):
        found = [
            difference(logits(ours, ids[:L], size), theirs[:L])
            for L, size in ((COMPARED, COMPARED), (SINGLE, 1))
        ]
    return mx.array(found).max().item()


def _add_indexers(folder: Path, indexers: dict[str, mx.array]) -> None:
    mx.save_safetensors(str(folder / INDEXER_WEIGHTS), indexers, {"format": "mlx"})
    # Pipelines load what the index names.
    names = {name: WEIGHTS for name in mx.load(str(folder / WEIGHTS))}
    names |= dict.fromkeys(indexers, INDEXER_WEIGHTS)
    size = sum((folder / file).stat().st_size for file in {*names.values()})
    index = {"metadata": {"total_size": size}, "weight_map": names}
    _write(folder / INDEX, index)


def _write(path: Path, facts: dict) -> None:
    path.write_text(json.dumps(facts, indent=2) + "\n")


def _option(name: str) -> str:
    named = {"trained": "indexers"}
    return f"--{named.get(name, name).replace('_', '-')}"


def _refuse_to_lose(out: Path, new: Path) -> None:
    """Only a folder that this script wrote may be replaced by another one."""
    names = _files(out) if out.is_dir() else {out.name}
    foreign = sorted(names - _files(new) - {INDEXER_WEIGHTS, INDEX})
    if foreign or names and not _is_ours(out / "config.json"):
        held = f"; it holds {', '.join(foreign[:3])}" if foreign else ""
        raise ValueError(f"{out} is not a folder that this script wrote{held}")


def _files(folder: Path) -> set[str]:
    """All that lies in a folder and its folders."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def _is_ours(config: Path) -> bool:
    return config.is_file() and f'"{WRITTEN_BY}"' in config.read_text()


def _link_weights(source: str, target: str) -> None:
    """The half gigabyte of the base is on disk once, where the disk can do that."""
    try:
        if not source.endswith(WEIGHTS):
            raise OSError
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


if __name__ == "__main__":
    sys.exit(main())
