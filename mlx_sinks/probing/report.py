"""What a probe saw, for a terminal and a script."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from .coverage import METRICS
from .recording import HEADINGS, Recording

# Skill below which a layer is named: docs/causes.md has the figures of trained, damaged
# and random indexers.
HEALTHY = 0.75


def as_dict(recording: Recording) -> dict[str, Any]:
    """A recording in types that JSON has, with ``None`` where nothing was seen."""
    means = by_layer(recording)
    return {
        "index_topk": recording.index_topk,
        "policy": str(recording.policy),
        "block": recording.block,
        "blocks": recording.blocks,
        "layers": recording.layers,
        "queries": recording.queries,
        "skill": _plain(skill(means)),
        "by_layer": {name: _plain(values) for name, values in means.items()},
        "by_layer_and_block": {
            name: _plain(recording.metric(name)) for name in METRICS
        },
        "suspects": [recording.layers[number] for number in suspects(means)],
    }


def by_layer(recording: Recording) -> dict[str, np.ndarray]:
    """Each of ``METRICS`` averaged over the blocks seen, shape (layers,), or NaN."""
    return {
        name: np.ma.masked_invalid(recording.metric(name)).mean(axis=1).filled(np.nan)
        for name in METRICS
    }


def skill(means: dict[str, np.ndarray]) -> np.ndarray:
    """How well each layer's indexer chooses, shape (layers,).

    0 where its columns cover as much attention as columns picked blindly, 1 where they
    cover as much as the best ones. Unlike the mass it doesn't depend on the length of
    the text. NaN where nothing was seen.
    """
    possible = means["mass_best"] - means["mass_chance"]
    return (means["mass"] - means["mass_chance"]) / possible


def suspects(means: dict[str, np.ndarray]) -> list[int]:
    """Layers whose indexer has a skill below ``HEALTHY``, the worst first.

    A skill of NaN, from attention that is NaN itself, counts as the worst. Layers of
    which nothing was seen aren't named.
    """
    skills, seen = skill(means), ~np.isnan(means["mass_chance"])
    return [n for n in worst_first(skills) if seen[n] and not skills[n] >= HEALTHY]


def worst_first(skills: np.ndarray) -> list[int]:
    """Numbers of the layers in the order of their skill; NaN comes first."""
    return np.argsort(np.nan_to_num(skills, nan=-np.inf), kind="stable").tolist()


def labels(names: list[str]) -> list[str]:
    """Names without the beginning and end that all share, where they are equally deep.

    For layers of one kind their number is left: ``7`` of ``model.layers.7.self_attn``.
    """
    parts = [name.split(".") for name in names]
    distinct = [n for n, column in enumerate(zip(*parts)) if len(set(column)) > 1]
    same_depth = len({len(part) for part in parts}) == 1
    if not (same_depth and distinct):
        return names
    return [".".join(part[distinct[0] : distinct[-1] + 1]) for part in parts]


def show(recording: Recording, console: Console, worst: int = 5) -> None:
    """Print the worst layers, the average, and which indexers lack skill."""
    means, names = by_layer(recording), labels(recording.layers)
    skills, sick = skill(means), suspects(means)
    table = Table(
        title=f"Share of dense attention on {recording.index_topk} selected columns",
        caption=f"The layers of least skill: 0 is a blind choice, 1 the best one. "
        f"{recording.queries} queries past index_topk; {recording.policy}.",
    )
    for heading in ("layer", "skill", *HEADINGS.values()):
        table.add_column(heading, justify="right")

    def add(name: str, skill: float, figures: dict[str, float]) -> None:
        cells = [f"{figures[key]:.1%}" for key in HEADINGS]
        table.add_row(name, f"{skill:.2f}", *cells)

    for number in worst_first(skills)[:worst]:
        figures = {key: values[number] for key, values in means.items()}
        add(names[number], skills[number], figures)
    table.add_section()
    add("mean", skills.mean(), {key: values.mean() for key, values in means.items()})
    console.print(table)
    total = f"{len(sick)} of {len(names)} layers"
    verdict = (
        f"{total} have no skill of {HEALTHY}, worst first: "
        + ", ".join(names[number] for number in sick)
        if sick
        else f"Every layer has a skill of at least {HEALTHY}"
    )
    console.print(f"{verdict}.", highlight=False)


def _plain(values: np.ndarray) -> list:
    return np.where(np.isnan(values), None, values.round(5).astype(object)).tolist()
