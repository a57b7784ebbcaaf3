"""What a probe saw, for a terminal, a script and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from .coverage import FIGURES
from .recorder import Recording

# Skill below which a layer is named: docs/causes.md has the figures of trained, damaged
# and random indexers.
HEALTHY = 0.75

HEADINGS = {
    "mass": "mass covered",
    "mass_guaranteed": "with the guarantee",
    "mass_best": "at best",
    "mass_chance": "by chance",
    "sinks_kept": "sinks kept",
    "recency_kept": "recency kept",
}


def as_dict(recording: Recording) -> dict[str, Any]:
    """A recording as JSON can hold it, ``None`` where nothing was seen."""
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
            name: _plain(recording.figure(name)) for name in FIGURES
        },
        "suspects": [recording.layers[number] for number in suspects(means)],
    }


def by_layer(recording: Recording) -> dict[str, np.ndarray]:
    """Each of ``FIGURES`` averaged over the blocks seen, shape (layers,), or NaN."""
    return {
        name: np.ma.masked_invalid(recording.figure(name)).mean(axis=1).filled(np.nan)
        for name in FIGURES
    }


def skill(means: dict[str, np.ndarray]) -> np.ndarray:
    """How much of what choosing can win each layer's indexer wins, shape (layers,).

    0 is the attention that as many columns picked blindly cover, 1 what the best ones
    do. Unlike the mass it doesn't depend on how far the text goes past ``index_topk``.
    NaN where nothing was seen.
    """
    possible = means["mass_best"] - means["mass_chance"]
    return (means["mass"] - means["mass_chance"]) / possible


def suspects(means: dict[str, np.ndarray]) -> list[int]:
    """Layers whose indexer has no skill of ``HEALTHY``; the worst first.

    NaN, from attention that is itself NaN, comes before all; a layer of which nothing
    was seen isn't named.
    """
    skills, seen = skill(means), ~np.isnan(means["mass_chance"])
    return [n for n in worst_first(skills) if seen[n] and not skills[n] >= HEALTHY]


def worst_first(skills: np.ndarray) -> list[int]:
    """Numbers of the layers, from no or the least skill on."""
    return np.argsort(np.nan_to_num(skills, nan=-np.inf), kind="stable").tolist()


def labels(names: list[str]) -> list[str]:
    """Names without the ends that several have in common, where they are equally deep.

    Of layers of one kind that is the number: ``7`` of ``model.layers.7.self_attn``.
    """
    parts = [name.split(".") for name in names]
    distinct = [n for n, column in enumerate(zip(*parts)) if len(set(column)) > 1]
    same_depth = len({len(part) for part in parts}) == 1
    if not (same_depth and distinct):
        return names
    return [".".join(part[distinct[0] : distinct[-1] + 1]) for part in parts]


def show(recording: Recording, console: Console, worst: int = 5) -> None:
    """The worst layers, the average, and what they say about the indexers."""
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


def draw(recording: Recording, path: Path, title: str) -> None:
    """Heat maps, layers by position, as a PNG file.

    Raises
    ------
    ImportError
        matplotlib, of the extra ``plots``, isn't there.
    """
    from matplotlib.figure import Figure

    panels = {k: v for k, v in HEADINGS.items() if k != "mass_chance"}
    figure = Figure(figsize=(4 * len(panels), 5), layout="constrained")
    figure.suptitle(title, parse_math=False)
    all_axes = figure.subplots(1, len(panels), sharey=True)
    for axes, (name, heading) in zip(all_axes, panels.items()):
        axes.set_title(heading)
        axes.set_xlabel("position")
        image = axes.pcolormesh(
            [*recording.blocks, recording.blocks[-1] + recording.block],
            np.arange(len(recording.layers) + 1) - 0.5,
            recording.figure(name),
            vmin=0,
            vmax=1,
        )
    all_axes[0].set_ylabel("layer")
    all_axes[0].invert_yaxis()
    figure.colorbar(image, ax=all_axes, label="share")
    figure.savefig(path, dpi=120)


def _plain(values: np.ndarray) -> list:
    return np.where(np.isnan(values), None, values.round(5).astype(object)).tolist()
