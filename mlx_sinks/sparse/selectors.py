"""The parts of a model that select keys, whoever wrote them."""

from __future__ import annotations

import mlx.nn as nn


def selecting_layers(model: nn.Module) -> dict[int, nn.Module]:
    """By layer number, the part that selects keys by learned scores.

    It is known by what all such parts have in common: a class that is called an
    indexer, or a number of keys or blocks to select.
    """
    found = {}
    for number, layer in enumerate(getattr(model, "layers", None) or [model]):
        parts = list(filter(_selects, layer.modules()))
        # Beside an indexer, the attention around it may know the number as well.
        parts.sort(key=_is_indexer, reverse=True)
        if parts:
            found[number] = parts[0]
    return found


def _is_indexer(part: nn.Module) -> bool:
    return "indexer" in type(part).__name__.lower()


def _selects(part: nn.Module) -> bool:
    counts = any(
        name.startswith("index_topk") and value is not None
        for name, value in vars(part).items()
    )
    return counts or _is_indexer(part)
