"""``mlx-sinks doctor``: look, say what is wrong, and how to mend it."""

from __future__ import annotations

import json
import os
import platform
import sys
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..patches.registry import patched, versions
from ..policy import Settings, SinkPolicy
from ..probing.command import record
from ..probing.reading import Reading
from ..probing.report import by_layer, labels, skill, suspects
from ..sparse.schedule import SHARED, CheckpointError, indexer_interleaves
from ..variable import QUIET_VARIABLE, VARIABLE
from .checkpoint_files import Checkpoint, read_checkpoint
from .diagnosis import (
    NOT_PROBED,
    Use,
    Verdict,
    command_of,
    index_topk_of,
    of_checkpoint,
    of_installation,
    of_probe,
    schedule_of,
)
from .places import Place, examine


def run(
    settings: Settings,
    *,
    model: str | None,
    context: int | None,
    max_kv_size: int | None,
    reading: Reading | None,
    as_json: bool,
    out: Path | None,
) -> int:
    """Examine, print, and write to a folder.

    Given a reading, it probes the model too. It returns the exit status: 1 where
    something is wrong, 2 where the probe couldn't look.
    """
    os.environ[QUIET_VARIABLE] = "1"  # trying a patch isn't using it
    errors = Console(stderr=True)
    with errors.status("Looking …"):
        checkpoint = model and read_checkpoint(model)
        places = examine(settings)
        if checkpoint:
            use = Use(context, max_kv_size)
            verdicts = of_checkpoint(checkpoint, places, settings, use)
        else:
            verdicts = of_installation(places, settings)
    if reading:
        # The probe decides whether the model is healthy: headers alone can't.
        verdicts = [verdict for verdict in verdicts if verdict.cause != "healthy"]
        verdicts += _probe(reading, checkpoint, places, settings, errors)
    wrong = any(verdict.wrong for verdict in verdicts)
    unseen = any(verdict.cause == NOT_PROBED for verdict in verdicts)
    result = {
        "versions": versions(),
        "python": platform.python_version(),
        "device": str(mx.default_device()),
        "on": sorted(place.target for place in places if place.on),
        "policy": _policy(settings, checkpoint),
        "places": [{**asdict(place), "open": place.open} for place in places],
        "model": checkpoint and facts(checkpoint),
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "wrong": wrong,
    }
    written = json.dumps(result, indent=2) + "\n"
    if as_json:
        sys.stdout.write(written)
    else:
        _show(result, places, verdicts, Console())
    if out:
        (out / "doctor.json").write_text(written)
    return 2 if unseen else int(wrong)


def _policy(settings: Settings, checkpoint: Checkpoint | None) -> str | None:
    """What the shell asks to keep; for a model that selects, fitted to index_topk."""
    policy = settings.policy
    if policy and checkpoint and checkpoint.selects:
        index_topk = index_topk_of(checkpoint)
        policy = policy.fit(index_topk) if policy.sinks < index_topk else policy
    return policy and str(policy)


def facts(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a checkpoint says that matters here."""
    config = checkpoint.config
    found = {
        "name": checkpoint.name,
        "model_type": config["model_type"],
        "layers": config.get("num_hidden_layers"),
        "max_position_embeddings": config.get("max_position_embeddings"),
    }
    if not checkpoint.selects:
        return found
    shared = interleaves = None  # of what no model can follow
    with suppress(CheckpointError):
        shared = schedule_of(config).count(SHARED)
    with suppress(CheckpointError):
        interleaves = indexer_interleaves(config)
    return {
        **found,
        "shared_layers": shared,
        "layers_with_indexer_weights": len(checkpoint.indexers()),
        "indexer_formats": checkpoint.indexer_formats(),
        "indexer_interleaves": interleaves,
        "index_topk": index_topk_of(checkpoint),
    }


def _probe(
    reading: Reading,
    checkpoint: Checkpoint,
    places: list[Place],
    settings: Settings,
    errors: Console,
) -> list[Verdict]:
    """Run as the shell's commands would, and look at what is selected."""
    if not checkpoint.selects:
        sentence = "it has no indexers that --probe could look at"
        return [Verdict("nothing selects", False, sentence)]
    policy = settings.policy
    there = {place.target for place in places if place.installed}
    targets = there.intersection(settings.targets)
    try:
        with patched(policy, targets) if policy else nullcontext():
            seen, _ = record(reading, policy or SinkPolicy(), errors)
    except (OSError, ValueError) as error:
        return [Verdict(NOT_PROBED, False, str(error))]
    means, names = by_layer(seen), labels(seen.layers)
    skills = dict(zip(names, skill(means).tolist()))
    sick = [names[number] for number in suspects(means)]
    return of_probe(sick, skills, settings, command_of(checkpoint))


def _show(
    result: dict[str, Any],
    places: list[Place],
    verdicts: list[Verdict],
    console: Console,
) -> None:
    console.print(
        f"{result['versions']}, Python {result['python']}, {result['device']}; "
        f"{VARIABLE}: {result['policy'] or 'off'}",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(title="Places that are known to lose sinks")
    for heading in ("target", "stock", "with mlx-sinks", "in this shell"):
        table.add_column(heading)
    for place in places:
        table.add_row(place.target, *map(escape, _in_short(place)))
    console.print(table)
    if result["model"]:
        line = _in_words(result["model"])
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    fixes_after = [verdict.fix for verdict in verdicts[1:]] + [None]
    for verdict, next_fix in zip(verdicts, fixes_after):
        cause, sentence = escape(verdict.cause), escape(verdict.sentence)
        lines = f"{_sign(verdict)} [bold]{cause}[/bold]: {sentence}"
        if verdict.fix and verdict.fix != next_fix:  # what mends both is said once
            lines += f"\n  {escape(verdict.fix)}"
        console.print(lines, highlight=False, soft_wrap=True)


def _in_short(place: Place) -> tuple[str, str, str]:
    """The cells of a place: in stock mlx-lm, with its patch, and in this shell."""
    if not place.installed:
        return f"{place.package} is not installed", "—", "—"
    return (
        "; ".join(place.faults) or "not affected",
        "refused" if place.refused else "mended" if place.cured else "no patch",
        "on" if place.on else "off",
    )


def _sign(verdict: Verdict) -> str:
    if verdict.wrong:
        return "[red]✗[/red]"
    return "[green]✓[/green]" if "healthy" in verdict.cause else "•"


def _in_words(model: dict[str, Any]) -> str:
    words = [f"{model['name']}: {model['model_type']}"]
    if model["layers"]:
        words.append("1 layer" if model["layers"] == 1 else f"{model['layers']} layers")
    if "index_topk" in model:
        formats = [f"{n} in {f}" for f, n in model["indexer_formats"].items()]
        pairs = {True: "neighbours", False: "halves", None: "nobody knows how"}
        if model["shared_layers"]:
            words.append(f"{model['shared_layers']} of them shared")
        words += [
            f"{model['layers_with_indexer_weights']} with indexer weights"
            + (f" ({', '.join(formats)})" if formats else ""),
            f"rotating {pairs[model['indexer_interleaves']]}",
            f"index_topk {model['index_topk']:,}",
        ]
    return ", ".join(words)
