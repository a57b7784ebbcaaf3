"""Verdicts: what is wrong, in one sentence each, and what mends it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from mlx_lm.models.deepseek_v32 import Indexer

from ..patches.mlx_lm_fidelity import rotates_neighbours
from ..policy import RECENCY, Settings, SinkPolicy
from ..sparse.schedule import (
    FULL,
    INTERLEAVES,
    ROPE_KEY,
    SHARED,
    CheckpointError,
    indexer_interleaves,
    indexer_schedule,
)
from ..sparse.selectors import selecting_layers
from ..variable import VARIABLE
from .checkpoint_files import Checkpoint
from .classes import NotBuilt, arguments, built, unreadable_quantisation
from .places import Place

# The fewest bits that docs/causes.md has measured.
FEWEST_BITS = 4
NOT_PROBED, NOT_EXAMINED = "not probed", "not examined"


@dataclass(frozen=True)
class Verdict:
    """One finding.

    Parameters
    ----------
    cause : str
        Fixed words that scripts can compare, for instance ``"sinks lost"``.
    wrong : bool
        Whether it is something to mend.
    sentence : str
        The finding, for a person.
    fix : str, optional
        The command that mends it, or what to do where no command does.
    """

    cause: str
    wrong: bool
    sentence: str
    fix: str | None = None


@dataclass(frozen=True)
class Use:
    """How a checkpoint is going to be run.

    Parameters
    ----------
    context : int, optional
        Tokens that it has to hold; by default all that its configuration allows.
    max_kv_size : int, optional
        As given to mlx-lm: a rotating window.
    """

    context: int | None = None
    max_kv_size: int | None = None


def of_checkpoint(
    checkpoint: Checkpoint, places: list[Place], settings: Settings, use: Use
) -> list[Verdict]:
    """What is wrong when this checkpoint runs from this shell."""
    affected = {place.target: place for place in places if place.open}
    command = command_of(checkpoint)
    found = [*_loading(checkpoint)]
    unknown = None if checkpoint.selects else _not_examined(checkpoint)
    if unknown:
        found.append(unknown)
    elif checkpoint.selects:
        fixes = {
            name: _fix(place, settings, command) for name, place in affected.items()
        }
        found += _schedule(checkpoint, use, fixes.get("index_share"))
        found += _rope(checkpoint, fixes.get("indexer_fidelity"))
        found += _formats(checkpoint)
        found += _selection(checkpoint, use, settings, fixes.get("dsa"))
        if use.max_kv_size:
            sentence = f"--max-kv-size reaches no layer of a {checkpoint.kind}"
            found.append(Verdict("no window", False, sentence))
    else:
        found += _window(affected.get("rotating"), settings, use, command)
    if place := affected.get("snapkv"):
        found.append(Verdict("snapkv", True, _all(place), _fix(place, settings)))
    if unknown or any(verdict.wrong for verdict in found):
        return sorted(found, key=lambda verdict: not verdict.wrong)
    sentence = (
        "every selection keeps its sinks; only --probe tells whether its indexers "
        "choose well"
        if checkpoint.selects
        else f"no layer of mlx-lm's {checkpoint.kind} selects keys"
    )
    return [Verdict("healthy", False, sentence), *found]


def command_of(checkpoint: Checkpoint) -> str:
    """The command that a user types to run a checkpoint."""
    return f"mlx_lm.generate --model {shlex.quote(checkpoint.name)}"


def of_probe(
    suspects: list[str], skills: Mapping[str, float], settings: Settings, command: str
) -> list[Verdict]:
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
            f"right weights; {_softened(settings, command)}",
        )
    ]


def _loading(checkpoint: Checkpoint) -> Iterator[Verdict]:
    """What keeps this mlx-lm from loading the weights, or from reading them right."""
    if checkpoint.own_code is None:
        with suppress(NotBuilt):
            yield from _dropped_rope(checkpoint.config)
        with suppress(NotBuilt):
            if quantised := unreadable_quantisation(checkpoint):
                yield Verdict(
                    "quantisation",
                    True,
                    f"its weights are quantised by {quantised}, which this mlx-lm "
                    "can't load",
                    "a copy in BF16, or one that mlx_lm.convert has written",
                )


def _dropped_rope(config: Mapping[str, Any]) -> Iterator[Verdict]:
    """Compare the rotary embedding in rope_parameters with what mlx-lm reads.

    transformers 5 writes the key for every kind; in mlx-lm some kinds read it.
    """
    stated = config.get("rope_parameters")
    theta = stated.get("rope_theta") if isinstance(stated, Mapping) else None
    read = arguments(config)
    if not isinstance(theta, (int, float)) or hasattr(read, "rope_parameters"):
        return
    drops_type = stated.get("rope_type", "default") != "default" and not getattr(
        read, "rope_scaling", None
    )
    if getattr(read, "rope_theta", theta) != theta or drops_type:
        scaling = {key: each for key, each in stated.items() if key != "rope_theta"}
        more = f' and "rope_scaling": {json.dumps(scaling)}' if drops_type else ""
        yield Verdict(
            "RoPE dropped",
            True,
            f"config.json has rope_theta {theta:,} in rope_parameters, which mlx-lm's "
            f"{config['model_type']} doesn't read: it rotates with "
            f"{getattr(read, 'rope_theta', None)}",
            f'in config.json "rope_theta": {theta}{more}',
        )


def _not_examined(checkpoint: Checkpoint) -> Verdict | None:
    """Why nobody can say from here whether a model loses sinks."""
    hints = checkpoint.mentions_selection
    name = shlex.quote(checkpoint.name)
    if checkpoint.own_code is not None:
        return Verdict(
            NOT_EXAMINED,
            False,
            f"its folder brings code of its own ({checkpoint.own_code}), which the "
            "doctor doesn't run",
            f"mlx-sinks doctor --probe --trust-remote-code {name}",
        )
    hint = f"; it has {', '.join(hints[:4])}" if hints else ""
    try:
        model = built(checkpoint.config)
    except NotBuilt as error:
        sentence = f"this mlx-lm builds no {checkpoint.kind} ({error}){hint}"
        return Verdict(NOT_EXAMINED, False, sentence)
    selecting = selecting_layers(model)
    if selecting:
        kinds = {type(part) for part in selecting.values()}
        whose = ", ".join(f"{kind.__module__}.{kind.__name__}" for kind in kinds)
        return Verdict(
            NOT_EXAMINED,
            False,
            f"{len(selecting)} of its layers select keys by {whose}, for which "
            "mlx-sinks has no target",
        )
    if hints:
        return Verdict(
            NOT_EXAMINED,
            False,
            f"no layer of mlx-lm's {checkpoint.kind} selects keys{hint}",
        )
    return None


def _schedule(checkpoint: Checkpoint, use: Use, fix: str | None) -> Iterator[Verdict]:
    """Compare the layers that select by the configuration with those by the weights."""
    layers = checkpoint.config["num_hidden_layers"]
    try:
        schedule = schedule_of(checkpoint.config)
    except CheckpointError as error:
        yield Verdict("schedule", True, f"config.json: {error}", "correct config.json")
        return
    full = {n for n, kind in enumerate(schedule) if kind == FULL}
    shared = set(range(layers)) - full
    if missing := full - checkpoint.whole_indexers():
        yield Verdict(
            "indexer weights missing",
            True,
            f"{_numbers(missing)} should select and lack weights of their indexers",
            "a complete copy of the checkpoint; if it is complete, its config.json "
            "lacks indexer_types",
        )
    if not shared:
        return
    what = f"{len(shared)} of {layers} layers are marked {SHARED}"
    made_up = len(shared & checkpoint.indexers().keys())
    weights = (
        f"{made_up} of them have indexer weights, which a converter made up"
        if made_up
        else "they have no indexer weights"
    )
    does = "lets them select with those" if made_up == len(shared) else "can't load it"
    # If all are made up, stock mlx-lm loads them; while all tokens fit, none selects.
    if fix and (made_up < len(shared) or _goes_past(checkpoint, use)):
        yield Verdict(
            "shared layers uninitialised",
            True,
            f"{what} and {weights}: stock mlx-lm {does}",
            fix,
        )
    elif made_up and not fix:
        yield Verdict("weights left out", False, f"{what} and {weights}")


def schedule_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """``"full"`` or ``"shared"`` for each layer; only ``glm_moe_dsa`` can share.

    Raises
    ------
    CheckpointError
        As from ``indexer_schedule``.
    """
    shares = config["model_type"] == "glm_moe_dsa"
    stated = indexer_schedule(config) if shares else None
    return stated or (FULL,) * config["num_hidden_layers"]


def _rope(checkpoint: Checkpoint, fix: str | None) -> Iterator[Verdict]:
    """Compare the RoPE convention that the weights need with that of this mlx-lm.

    What config.json states goes before what checkpoints of its kind usually have.
    """
    config = checkpoint.config
    try:
        wanted = indexer_interleaves(config)
        indexer = Indexer(arguments(config))
        stock = rotates_neighbours(indexer)
    except Exception as error:  # whatever upstream raises for what stands there
        kind = "" if isinstance(error, NotBuilt) else f"{type(error).__name__}: "
        reason = f"{kind}{error}"
        yield Verdict(
            "configuration",
            True,
            f"mlx-lm can't build its indexers from config.json ({reason})",
            "the config.json of the original checkpoint",
        )
        return
    has_a_switch = hasattr(indexer.rope, "traditional")
    if not isinstance(stock, bool):
        if fix:
            yield Verdict(
                "configuration",
                True,
                f"config.json says {ROPE_KEY}={stock!r}: this mlx-lm loads it and "
                "fails at its first token",
                fix,
            )
    elif stock != wanted and (fix or not has_a_switch):
        yield Verdict(
            "RoPE flipped",
            True,
            f"this mlx-lm rotates indexers with interleave={stock}; the weights need "
            f"{wanted}",
            fix
            if has_a_switch
            else f"nothing here: its {type(indexer.rope).__name__} can't rotate so",
        )
    if wanted != INTERLEAVES[checkpoint.kind]:
        yield Verdict(
            "unusual RoPE",
            False,
            f"config.json says {ROPE_KEY}={wanted}; a {checkpoint.kind} usually has "
            f"{not wanted}. mlx-sinks probe tells whether its indexers choose well",
        )


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
    checkpoint: Checkpoint, use: Use, settings: Settings, fix: str | None
) -> Iterator[Verdict]:
    topk = index_topk_of(checkpoint)
    if not _goes_past(checkpoint, use):
        yield Verdict(
            "dense",
            False,
            f"all its tokens fit in index_topk {topk:,}: nothing is selected",
        )
    elif fix:
        yield Verdict(
            "sinks lost",
            True,
            f"past {topk:,} tokens nothing keeps the first ones in a selection",
            fix,
        )
    if _sinks("dsa", settings) >= topk:
        yield _too_many(settings.policy.sinks, f"index_topk {topk}")


def _window(
    place: Place | None, settings: Settings, use: Use, command: str
) -> Iterator[Verdict]:
    size, context = use.max_kv_size, use.context
    if size is None:
        return
    command += f" --max-kv-size {size}"
    if place and (context is None or context > size):
        yield Verdict(
            "rotating mask", True, _all(place), _fix(place, settings, command)
        )
    if _sinks("rotating", settings) >= size:
        yield _too_many(settings.policy.sinks, f"--max-kv-size {size}")


def _sinks(target: str, settings: Settings) -> int:
    """How many sinks a target is told to keep."""
    return settings.policy.sinks if target in settings.targets else 0


def _too_many(sinks: int, limit: str) -> Verdict:
    return Verdict(
        "too many sinks",
        True,
        f"{VARIABLE} asks for {sinks} sinks, which don't fit in {limit}: refused",
        f'{VARIABLE}="sinks=N" with fewer',
    )


def _goes_past(checkpoint: Checkpoint, use: Use) -> bool:
    """Whether the checkpoint has to hold more tokens than a selection has columns."""
    context = use.context or checkpoint.config.get("max_position_embeddings")
    return context is None or context > index_topk_of(checkpoint)


def index_topk_of(checkpoint: Checkpoint) -> int:
    """Columns of a selection; upstream's default where config.json gives none."""
    return checkpoint.config.get("index_topk", 2048)


def _fix(place: Place, settings: Settings, command: str = "COMMAND") -> str:
    """What mends a place: a command that leaves all else as the shell has it."""
    if place.target == "snapkv":
        return (
            "a budget of 32 rows or more, or one that keeps every sink: mlx-sinks "
            f"run --kv-budget N {command}"
        )
    if place.refused:
        return place.refused
    settings = settings.switched_on(place.target)
    if not settings.policy.sinks:
        policy = replace(settings.policy, sinks=SinkPolicy().sinks)
        settings = replace(settings, policy=policy)
    return _typed(settings, command)


def _softened(settings: Settings, command: str) -> str:
    """What helps until the weights are right: the guarantee with recency enough."""
    softer = settings.switched_on("dsa")
    policy = softer.policy
    if policy.recency is not None and policy.recency < RECENCY:
        softer = replace(softer, policy=replace(policy, recency=None))
    if softer == settings:
        return "until then the guarantee, which is on, softens it"
    return f"what softens it until then: {_typed(softer, command)}"


def _typed(settings: Settings, command: str) -> str:
    """The line that a user types to run a command with these settings."""
    value = settings.value()
    quoted = value if value.isalnum() else f'"{value}"'
    return f"{VARIABLE}={quoted} {command}"


def _all(place: Place) -> str:
    return "; ".join(place.faults)


def _numbers(layers: set[int]) -> str:
    shown = ", ".join(map(str, sorted(layers)[:8]))
    if len(layers) > 8:
        shown += f" and {len(layers) - 8} more"
    return f"layer {shown}" if len(layers) == 1 else f"layers {shown}"
