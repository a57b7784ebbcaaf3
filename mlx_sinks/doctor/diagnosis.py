"""From what was found to what is wrong, each in one sentence with what helps."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mlx_lm.models.deepseek_v32 import Indexer

from ..checkpoint import (
    FULL,
    INTERLEAVES,
    ROPE_KEY,
    SHARED,
    CheckpointError,
    indexer_interleaves,
    indexer_schedule,
)
from ..policy import VARIABLE
from .checkpoint_files import Checkpoint
from .places import SNAPKV, Place

# Bits that the measurements of docs/causes.md go down to.
FEWEST_BITS = 4


@dataclass(frozen=True)
class Verdict:
    """One finding.

    Parameters
    ----------
    cause : str
        A word for scripts, for instance ``"sinks lost"``.
    wrong : bool
        Whether it is something to mend.
    sentence : str
        What it is.
    fix : str, optional
        The command that mends it, or what to do where none does.
    """

    cause: str
    wrong: bool
    sentence: str
    fix: str | None = None


def of_installation(places: list[Place]) -> list[Verdict]:
    """What loses sinks in this installation, whatever the model."""
    found = [
        Verdict(place.target, True, f"{place.module}: {_all(place)}", _fix(place))
        for place in places
        if place.open
    ]
    return found or [Verdict("healthy", False, "nothing here loses a sink")]


def of_checkpoint(
    checkpoint: Checkpoint,
    places: list[Place],
    context: int | None = None,
    max_kv_size: int | None = None,
) -> list[Verdict]:
    """What is wrong when this checkpoint runs from this shell.

    Parameters
    ----------
    checkpoint : Checkpoint
        What its headers say.
    places : list of Place
        As ``examine`` found them.
    context : int, optional
        Tokens that it is to hold; by default all that its configuration allows.
    max_kv_size : int, optional
        As given to mlx-lm: a rotating window.
    """
    by_target = {place.target: place for place in places}
    command = f"mlx_lm.generate --model {checkpoint.name}"
    kind = checkpoint.config["model_type"]
    found: list[Verdict] = []
    if kind in INTERLEAVES:
        found += _schedule(checkpoint, by_target["index_share"], command)
        found += _rope(checkpoint, by_target["indexer_fidelity"], command)
        found += _formats(checkpoint)
        found += _selection(checkpoint, by_target["dsa"], context, command)
    elif max_kv_size is not None and by_target["rotating"].open:
        command += f" --max-kv-size {max_kv_size}"
        place = by_target["rotating"]
        found.append(Verdict("rotating mask", True, _all(place), _fix(place, command)))
    if any(verdict.wrong for verdict in found):
        return found
    sentence = f"nothing is known to lose a sink in this {kind}"
    if kind in INTERLEAVES:
        sentence += "; whether its indexers choose well only --probe tells"
    return [*found, Verdict("healthy", False, sentence)]


def of_probe(suspects: list[str], skills: Mapping[str, float]) -> list[Verdict]:
    """What a probe says of the indexers that it saw choose."""
    if not suspects:
        return [Verdict("indexers healthy", False, "every indexer probed chooses well")]
    worst = ", ".join(f"{name} ({skills[name]:.2f})" for name in suspects[:5])
    more = f" and {len(suspects) - 5} more" if len(suspects) > 5 else ""
    return [
        Verdict(
            "indexers choose badly",
            True,
            f"{len(suspects)} of {len(skills)} layers select little of what attention "
            f"wants, worst first (skill): {worst}{more}",
            f"right weights; until then {VARIABLE}=recency=128 softens it",
        )
    ]


def _schedule(checkpoint: Checkpoint, place: Place, command: str) -> Iterator[Verdict]:
    """Layers that select, as the configuration and as the weights have it."""
    layers, owners = checkpoint.config["num_hidden_layers"], checkpoint.indexer_layers()
    try:
        schedule = schedule_of(checkpoint.config)
    except CheckpointError as error:
        yield Verdict("schedule", True, f"config.json: {error}", "correct config.json")
        return
    full = {n for n, kind in enumerate(schedule) if kind == FULL}
    shared = set(range(layers)) - full
    if missing := full - owners:
        yield Verdict(
            "indexer weights missing",
            True,
            f"{_numbers(missing)} should select and have no indexer weights",
            "a complete copy of the checkpoint, and its config.json with indexer_types",
        )
    if not shared:
        return
    what = f"{len(shared)} of {layers} layers are marked {SHARED}"
    made_up = len(shared & owners)
    weights = (
        f"{made_up} of them have indexer weights, which a converter made up"
        if made_up
        else "they have no indexer weights"
    )
    if place.open:
        yield Verdict(
            "shared layers uninitialised",
            True,
            f"{what} and {weights}: stock mlx-lm refuses to load them, or lets them "
            "select at random",
            _fix(place, command),
        )
    elif made_up:
        yield Verdict("weights left out", False, f"{what} and {weights}")


def schedule_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Each layer's kind: full, but where a kind that can share says otherwise.

    Raises
    ------
    CheckpointError
        As from ``indexer_schedule``.
    """
    shares = config["model_type"] == "glm_moe_dsa"
    stated = indexer_schedule(config) if shares else None
    return stated or (FULL,) * config["num_hidden_layers"]


def _rope(checkpoint: Checkpoint, place: Place, command: str) -> Iterator[Verdict]:
    """The convention that the weights were trained with, stated, and run with."""
    config = checkpoint.config
    usual, wanted = INTERLEAVES[config["model_type"]], indexer_interleaves(config)
    if wanted != usual:
        yield Verdict(
            "RoPE flipped",
            True,
            f"config.json says {ROPE_KEY}={wanted}; the reference of "
            f"{config['model_type']} has {usual}",
            f"set {ROPE_KEY} to {str(usual).lower()} in config.json",
        )
    elif place.open and rope_of_stock(config) != wanted:
        yield Verdict(
            "RoPE flipped",
            True,
            f"this mlx-lm rotates indexers with interleave={not wanted}; the weights "
            f"need {wanted}",
            _fix(place, command),
        )


def rope_of_stock(config: Mapping[str, Any]) -> bool:
    """The convention with which this mlx-lm builds a checkpoint's indexers."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    return Indexer(module.ModelArgs.from_dict(config)).rope.traditional


def _formats(checkpoint: Checkpoint) -> Iterator[Verdict]:
    coarse = {
        name: count
        for name, count in checkpoint.indexer_formats().items()
        if name.endswith("-bit") and int(name.split("-")[0]) < FEWEST_BITS
    }
    for name, count in coarse.items():
        yield Verdict(
            "coarse indexer",
            False,
            f"{count} projections of indexers have {name} weights; nobody has measured "
            f"fewer than {FEWEST_BITS}: see mlx-sinks probe",
        )


def _selection(
    checkpoint: Checkpoint, place: Place, context: int | None, command: str
) -> Iterator[Verdict]:
    index_topk = checkpoint.config.get("index_topk", 2048)
    context = context or checkpoint.config.get("max_position_embeddings")
    if context is not None and context <= index_topk:
        yield Verdict(
            "dense",
            False,
            f"{context:,} tokens fit in index_topk {index_topk:,}: nothing is selected",
        )
    elif place.open:
        yield Verdict(
            "sinks lost",
            True,
            f"past {index_topk:,} tokens nothing keeps the first ones in a selection",
            _fix(place, command),
        )


def _all(place: Place) -> str:
    return "; ".join(place.faults)


def _fix(place: Place, command: str = "COMMAND") -> str:
    if place.target == SNAPKV:
        return "a budget of 32 rows or more"
    if place.refused:
        return place.refused
    return f"{VARIABLE}=1 {command}"


def _numbers(layers: set[int]) -> str:
    shown = ", ".join(map(str, sorted(layers)[:8]))
    return f"layers {shown}{' …' if len(layers) > 8 else ''} ({len(layers)})"
