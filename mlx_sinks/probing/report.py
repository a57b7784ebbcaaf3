"""What a probe saw, for a terminal and a script."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from .coverage import METRICS
from .picture import HEADINGS
from .recording import Recording
from .skill import HEALTHY, labels, over_blocks, skill, suspects, worst_first


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
    return {name: over_blocks(recording.metric(name)) for name in METRICS}


def show(recording: Recording, console: Console, worst: int = 5) -> None:
    """Print the worst layers, the average, and which indexers lack skill."""
    means, names = by_layer(recording), labels(recording.layers)
    skills, sick = skill(means), suspects(means)
    table = Table(
        title=f"Share of dense attention on {recording.index_topk} selected columns",
        caption=f"The layers of least skill: 0 is a blind choice, 1 the best one. "
        f"{recording.queries} queries past index_topk; {recording.policy}.",
    )
    for heading in ("layer", "skill"):
        table.add_column(heading, justify="right")
    for heading in HEADINGS.values():  # in 80 columns, no word cut
        width = max(len("100.0%"), *map(len, heading.split()))
        table.add_column(heading, justify="right", width=width)

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
        f"{total} have a skill below {HEALTHY}, worst first: "
        + ", ".join(names[number] for number in sick)
        if sick
        else f"Every layer has a skill of at least {HEALTHY}"
    )
    console.print(f"{verdict}.", highlight=False)


def _plain(values: np.ndarray) -> list:
    return np.where(np.isnan(values), None, values.round(5).astype(object)).tolist()
