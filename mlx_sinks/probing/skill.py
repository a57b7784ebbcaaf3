"""How well an indexer chooses, by what its selections cover."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

# Skill below which a layer is named: docs/causes.md has the figures of trained, damaged
# and random indexers.
HEALTHY = 0.75


def skill(means: Mapping[str, np.ndarray]) -> np.ndarray:
    """How well indexers choose, of the shape of the metrics: by layer, say.

    0 where the columns cover as much attention as columns picked blindly, 1 where they
    cover as much as the best ones. Unlike the mass it doesn't depend on the length of
    the text. NaN where nothing was seen.
    """
    possible = means["mass_best"] - means["mass_chance"]
    return (means["mass"] - means["mass_chance"]) / possible


def over_blocks(values: np.ndarray) -> np.ndarray:
    """The average of (layers, blocks) over the blocks seen; NaN where none was."""
    return np.ma.masked_invalid(values).mean(axis=1).filled(np.nan)


def suspects(means: Mapping[str, np.ndarray]) -> list[int]:
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
