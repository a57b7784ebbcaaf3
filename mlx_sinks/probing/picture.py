"""A recording as a picture: layers by position, the layers of little skill marked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .coverage import METRICS
from .skill import HEALTHY, labels, over_blocks, skill, suspects

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# As tables and pictures show them.
HEADINGS = {
    "mass": "mass covered",
    "mass_guaranteed": "with the guarantee",
    "mass_best": "at best",
    "mass_chance": "by chance",
    "sinks_kept": "sinks kept",
    "recency_kept": "recency kept",
}


def draw(
    layers: list[str],
    blocks: list[int],
    block: int,
    metrics: Mapping[str, np.ndarray],
    title: str,
) -> Figure:
    """Heat maps of the skill and the metrics.

    Parameters
    ----------
    layers : list of str
        Names of the layers.
    blocks : list of int
        First position of each block.
    block : int
        Number of positions in a block.
    metrics : mapping of str to np.ndarray, shape (layers, blocks)
        All of ``METRICS``.
    title : str
        Whose picture it is.

    Raises
    ------
    ImportError
        matplotlib, of the extra ``plots``, isn't installed.
    """
    from matplotlib.figure import Figure

    panels = {"skill": skill(metrics)}
    panels |= {HEADINGS[name]: metrics[name] for name in METRICS if name in _DRAWN}
    sick = set(suspects({name: over_blocks(each) for name, each in metrics.items()}))
    height = min(max(2.5, 0.09 * len(layers)), 6)
    figure = Figure(figsize=(11, 1.2 + 2 * (height + 0.6)), layout="constrained")
    named = f"{len(sick)} of {len(layers)} layers have a skill below {HEALTHY}"
    figure.suptitle(f"{title}\n{named} (red)" * bool(sick) or title, parse_math=False)
    all_axes = figure.subplots(2, 3, sharey=True).ravel()
    for axes, (heading, values) in zip(all_axes, panels.items()):
        axes.set_title(heading)
        axes.set_xlabel("position")
        image = axes.pcolormesh(
            [*blocks, blocks[-1] + block],
            np.arange(len(layers) + 1) - 0.5,
            values,
            vmin=0,
            vmax=1,
        )
    names = labels(layers)
    every = max(1, len(layers) // 30)
    shown = sorted({*range(0, len(layers), every), *(sick if len(sick) < 40 else ())})
    for axes in (all_axes[0], all_axes[3]):
        axes.set_ylabel("layer")
        axes.set_yticks(shown, [names[number] for number in shown], fontsize=7)
        for number, label in zip(shown, axes.get_yticklabels()):
            label.set_color("red" if number in sick else "black")
    all_axes[0].invert_yaxis()
    figure.colorbar(image, ax=all_axes, label="share", shrink=0.4, aspect=30)
    return figure


# By chance is what the skill is measured from; the other metrics have a panel each.
_DRAWN = frozenset(METRICS) - {"mass_chance"}


def draw_written(facts: Mapping[str, Any]) -> Figure:
    """The picture of a ``probe.json``.

    Raises
    ------
    ImportError
        As from ``draw``.
    ValueError
        The facts are none of a probe.
    """
    try:
        metrics = {
            name: np.array(facts["by_layer_and_block"][name], dtype=float)
            for name in METRICS
        }
        title = f"{facts['model']}, {facts['policy']}"
        layers, blocks, block = (facts[name] for name in ("layers", "blocks", "block"))
        if {each.shape for each in metrics.values()} != {(len(layers), len(blocks))}:
            raise ValueError("its figures don't fit its layers and blocks")
    except (LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"it is no probe.json ({reason})") from None
    return draw(layers, blocks, block, metrics, title)
