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
from ..probing.report import by_layer
from ..probing.skill import labels, skill, suspects
from ..sparse.schedule import SHARED, CheckpointError, indexer_interleaves
from ..variable import QUIET_VARIABLE, VARIABLE
from .checkpoint_files import Checkpoint, read_checkpoint
from .diagnosis import (
    NOT_EXAMINED,
    NOT_PROBED,
    Use,
    Verdict,
    command_of,
    index_topk_of,
    of_checkpoint,
    of_probe,
    schedule_of,
)
from .places import Place, examine


def run(
    settings: Settings,
    *,
    model: str,
    context: int | None,
    max_kv_size: int | None,
    reading: Reading | None,
    all_places: bool,
    as_json: bool,
    out: Path | None,
) -> int:
    """Examine, print, and write to a folder.

    Given a reading, it probes the model too. It returns the exit status: 1 where
    something is wrong, 2 where the probe couldn't look, 3 where the model is of no kind
    that the doctor knows.
    """
    os.environ[QUIET_VARIABLE] = "1"  # trying a patch isn't using it
    errors = Console(stderr=True)
    with errors.status("Looking …"):
        checkpoint = read_checkpoint(model)
        places = examine(settings)
        use = Use(context, max_kv_size)
        verdicts = of_checkpoint(checkpoint, places, settings, use)
    if reading:
        verdicts = _with_probe(verdicts, reading, checkpoint, places, settings, errors)
    causes = {verdict.cause for verdict in verdicts}
    wrong = any(verdict.wrong for verdict in verdicts)
    result = {
        "versions": versions(),
        "python": platform.python_version(),
        "device": str(mx.default_device()),
        "on": sorted(place.target for place in places if place.on),
        "policy": _policy(settings, checkpoint),
        "places": [{**asdict(place), "open": place.open} for place in places],
        "model": facts(checkpoint),
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "wrong": wrong,
    }
    written = json.dumps(result, indent=2) + "\n"
    if as_json:
        sys.stdout.write(written)
    else:
        _show(result, places if all_places else [], verdicts, Console())
    if out:
        (out / "doctor.json").write_text(written)
    if NOT_PROBED in causes:
        return 2
    return 1 if wrong else 3 * (NOT_EXAMINED in causes)


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


def _with_probe(
    verdicts: list[Verdict],
    reading: Reading,
    checkpoint: Checkpoint,
    places: list[Place],
    settings: Settings,
    errors: Console,
) -> list[Verdict]:
    """Run as the shell's commands would, and look at what is selected."""
    causes = {verdict.cause for verdict in verdicts}
    if not checkpoint.selects and NOT_EXAMINED not in causes:
        sentence = "it has no indexers that --probe could look at"
        return [*verdicts, Verdict("nothing selects", False, sentence)]
    # The probe decides whether the model is healthy: headers alone can't.
    rest = [v for v in verdicts if v.cause not in ("healthy", NOT_EXAMINED)]
    policy = settings.policy
    there = {place.target for place in places if place.installed}
    targets = there.intersection(settings.targets)
    try:
        with patched(policy, targets) if policy else nullcontext():
            seen, _ = record(reading, policy or SinkPolicy(), errors)
    except (OSError, ValueError) as error:
        return [*verdicts, Verdict(NOT_PROBED, False, str(error))]
    means, names = by_layer(seen), labels(seen.layers)
    skills = dict(zip(names, skill(means).tolist()))
    sick = [names[number] for number in suspects(means)]
    return [*of_probe(sick, skills, settings, command_of(checkpoint)), *rest]


def _show(
    result: dict[str, Any],
    places: list[Place],
    verdicts: list[Verdict],
    console: Console,
) -> None:
    """The verdicts first, a sentence each, then what mends them, then the facts."""
    for verdict in verdicts:
        cause, sentence = escape(verdict.cause), escape(verdict.sentence)
        lines = f"{_sign(verdict)} [bold]{cause}[/bold]: {sentence}"
        console.print(lines, highlight=False)
    for fix in dict.fromkeys(verdict.fix for verdict in verdicts if verdict.fix):
        # A command is pasted: it stays on its line.
        console.print(f"  → {escape(fix)}", highlight=False, soft_wrap=True)
    console.print()
    console.print(_in_words(result["model"]), markup=False, highlight=False)
    about = (
        f"{result['versions']}, Python {result['python']}, {result['device']}; "
        f"{VARIABLE}: {result['policy'] or 'off'}"
    )
    console.print(about, highlight=False, style="dim")
    if places:
        table = Table(title="Places that are known to lose sinks")
        for heading in ("target", "stock", "with mlx-sinks", "in this shell"):
            table.add_column(heading)
        for place in places:
            table.add_row(place.target, *map(escape, _in_short(place)))
        console.print(table)
    else:
        console.print("--all shows all places known to lose sinks", style="dim")


def _in_short(place: Place) -> tuple[str, str, str]:
    """The cells of a place: in stock mlx-lm, with its patch, and in this shell."""
    if not place.installed:
        return f"{place.package} is not installed", "—", "—"
    mended = "mended" if place.cured else "no patch"
    return (
        "; ".join(place.faults) or "no fault",
        "refused" if place.refused else mended if place.faults else "adds a budget",
        "on" if place.on else "off",
    )


def _sign(verdict: Verdict) -> str:
    if verdict.wrong:
        return "[red]✗[/red]"
    if verdict.cause in (NOT_EXAMINED, NOT_PROBED):
        return "[yellow]?[/yellow]"
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
