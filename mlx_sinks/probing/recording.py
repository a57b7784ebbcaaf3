"""What a probe saw of each layer's selections."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..policy import SinkPolicy
from .coverage import METRICS
from .picture import draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class ProbeError(ValueError):
    """A model whose selections can't be recorded, or a recording without any."""


@dataclass
class Recording:
    """What the selections of each layer kept, by block of positions.

    Grows while the probe runs; can be read at any time.

    Parameters
    ----------
    layers : list of str
        Names of the attention modules that select, in the order of the model.
    index_topk : int
        Number of columns of a selection. Queries at lower positions select nothing.
    policy : SinkPolicy
        What counts as a sink and as recent, and what the guarantee would keep.
    block : int
        Number of positions in a block.
    """

    layers: list[str]
    index_topk: int
    policy: SinkPolicy
    block: int
    _sums: dict[tuple[int, int], np.ndarray] = field(default_factory=dict, repr=False)
    _counts: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)

    @property
    def blocks(self) -> list[int]:
        """First position of each block in which a query was looked at."""
        return sorted({block * self.block for _, block in self._sums})

    @property
    def queries(self) -> int:
        """Number of queries looked at, in all layers together."""
        return sum(self._counts.values())

    def metric(self, name: str) -> np.ndarray:
        """One of ``METRICS`` by layer and block.

        Parameters
        ----------
        name : str
            ``"sinks_kept"`` and ``"recency_kept"`` are shares of what the policy would
            force, found in the selection by scores alone. ``"mass"``,
            ``"mass_guaranteed"``, ``"mass_best"`` and ``"mass_chance"`` are shares of
            dense attention, averaged over heads: on that selection, on the one with the
            guarantee, on the columns that attention itself weighs most, and on columns
            picked blindly.

        Returns
        -------
        np.ndarray of float, shape (layers, blocks)
            From 0 to 1; NaN where no query was looked at.

        Raises
        ------
        ValueError
            An unknown name.
        ProbeError
            Nothing was selected: no text went past ``index_topk`` tokens.
        """
        if name not in METRICS:
            known = ", ".join(METRICS)
            raise ValueError(f"{name!r} is not a metric (known: {known})")
        blocks = self.blocks
        if not blocks:
            raise ProbeError(
                f"no query was looked at: up to index_topk={self.index_topk} tokens "
                "nothing is selected; give the model a longer text"
            )
        column, means = (
            METRICS.index(name),
            np.full((len(self.layers), len(blocks)), np.nan),
        )
        for (layer, block), sums in self._sums.items():
            mean = sums[column] / self._counts[layer, block]
            means[layer, blocks.index(block * self.block)] = mean
        return means

    def add(self, layer: int, position: int, metrics: np.ndarray) -> None:
        """Add one query's ``METRICS``."""
        key = layer, position // self.block
        self._sums[key] = self._sums.get(key, 0) + metrics
        self._counts[key] = self._counts.get(key, 0) + 1

    def plot(self, title: str | None = None) -> Figure:
        """Heat maps of skill and metrics by layer and position; ``savefig`` writes it.

        Raises
        ------
        ImportError
            matplotlib, of the extra ``plots``, isn't installed.
        ProbeError
            As from ``metric``.
        """
        metrics = {name: self.metric(name) for name in METRICS}
        title = title or str(self.policy)
        return draw(self.layers, self.blocks, self.block, metrics, title)
