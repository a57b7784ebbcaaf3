"""``mlx-sinks doctor``: look, say what is wrong, and how to mend it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import mlx.core as mx
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..patches.registry import QUIET_VARIABLE, patched, versions
from ..policy import TARGETS, SinkPolicy
from ..probing.command import observe
from ..probing.report import by_layer, labels, skill, suspects
from ..sparse.schedule import SHARED, CheckpointError, indexer_interleaves
from .checkpoint_files import Checkpoint, read_checkpoint
from .diagnosis import (
    NOT_PROBED,
    Shell,
    Use,
    Verdict,
    command_of,
    index_topk,
    of_checkpoint,
    of_installation,
    of_probe,
    schedule_of,
)
from .places import Place, examine


def run(options: argparse.Namespace, shell: Shell) -> int:
    """Examine as the options ask, print, and write.

    The exit status: 1 where something is wrong, 2 where the probe couldn't look.
    """
    os.environ[QUIET_VARIABLE] = "1"  # trying a patch isn't using it
    errors = Console(stderr=True)
    with errors.status("Looking …"):
        checkpoint = options.model and read_checkpoint(options.model)
        places = examine(shell.on())
        if checkpoint:
            use = Use(options.context, options.max_kv_size)
            verdicts = of_checkpoint(checkpoint, places, shell, use)
        else:
            verdicts = of_installation(places, shell)
    if options.probe:
        # Headers alone don't make it healthy any more.
        verdicts = [verdict for verdict in verdicts if verdict.cause != "healthy"]
        verdicts += _probe(options, checkpoint, shell, errors)
    wrong = any(verdict.wrong for verdict in verdicts)
    unseen = any(verdict.cause == NOT_PROBED for verdict in verdicts)
    result = {
        "versions": versions(),
        "python": platform.python_version(),
        "device": str(mx.default_device()),
        "on": sorted(shell.on()),
        "policy": shell.policy and str(shell.policy),
        "places": [{**asdict(place), "open": place.open} for place in places],
        "model": checkpoint and facts(checkpoint),
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "wrong": wrong,
    }
    written = json.dumps(result, indent=2) + "\n"
    if options.out:
        options.out.write_text(written)
    if options.json:
        sys.stdout.write(written)
    else:
        _show(result, places, verdicts, Console())
    return 2 if unseen else int(wrong)


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
    try:
        shared = schedule_of(config).count(SHARED)
    except CheckpointError:
        shared = None
    return {
        **found,
        "shared_layers": shared,
        "layers_with_indexer_weights": len(checkpoint.indexers()),
        "indexer_formats": checkpoint.indexer_formats(),
        "indexer_interleaves": indexer_interleaves(config),
        "index_topk": index_topk(checkpoint),
    }


def _probe(
    options: argparse.Namespace, checkpoint: Checkpoint, shell: Shell, errors: Console
) -> list[Verdict]:
    """Run as the shell's commands would, and look at what is selected."""
    if not checkpoint.selects:
        sentence = "it has no indexers that --probe could look at"
        return [Verdict("nothing selects", False, sentence)]
    policy, targets = shell.policy, frozenset(TARGETS) - set(shell.off)
    try:
        with patched(policy, targets) if policy else nullcontext():
            seen, _ = observe(options, policy or SinkPolicy(), errors)
    except (OSError, ValueError) as error:
        return [Verdict(NOT_PROBED, False, str(error))]
    means, names = by_layer(seen), labels(seen.layers)
    skills = dict(zip(names, skill(means).tolist()))
    sick = [names[number] for number in suspects(means)]
    return of_probe(sick, skills, shell, command_of(checkpoint))


def _show(
    result: dict[str, Any],
    places: list[Place],
    verdicts: list[Verdict],
    console: Console,
) -> None:
    console.print(
        f"{result['versions']}, Python {result['python']}, {result['device']}",
        highlight=False,
    )
    table = Table(title="Places that are known to lose sinks")
    for heading in ("target", "stock mlx-lm", "with mlx-sinks", "in this shell"):
        table.add_column(heading)
    for place in places:
        table.add_row(
            place.target,
            escape("; ".join(place.faults) or "not affected"),
            "refused" if place.refused else "mended" if place.cured else "no patch",
            "on" if place.on else "off",
        )
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
        pairs = "neighbours" if model["indexer_interleaves"] else "halves"
        if model["shared_layers"]:
            words.append(f"{model['shared_layers']} of them shared")
        words += [
            f"{model['layers_with_indexer_weights']} with indexer weights"
            + (f" ({', '.join(formats)})" if formats else ""),
            f"rotating {pairs}",
            f"index_topk {model['index_topk']:,}",
        ]
    return ", ".join(words)
