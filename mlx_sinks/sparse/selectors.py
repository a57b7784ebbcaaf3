"""The parts of a model that select keys, whoever wrote them."""

from __future__ import annotations

import re

import mlx.nn as nn

# How a number of keys or blocks to select is called. Experts have another name.
_COUNT = re.compile("(index|sparse|block).*top_?k|top_?k_?(index|sparse|block)")


def selecting_layers(model: nn.Module) -> dict[int, nn.Module]:
    """By layer number, the part that selects keys by learned scores.

    A part outside of the layers has a negative number.
    It is known by what all such parts have in common: a class that is called an
    indexer, or a number of keys or blocks to select.
    """
    found, seen = {}, set()
    for number, layer in enumerate(getattr(model, "layers", None) or [model]):
        if not isinstance(layer, nn.Module):
            continue
        modules = layer.modules()
        seen.update(map(id, modules))
        parts = list(filter(_selects, modules))
        # Beside an indexer, the attention around it may know the number as well.
        parts.sort(key=_is_indexer, reverse=True)
        if parts:
            found[number] = parts[0]
    elsewhere = (part for part in model.modules() if id(part) not in seen)
    outside = list(filter(_is_indexer, elsewhere))  # one that several layers share
    return found | {-1 - n: part for n, part in enumerate(outside)}


def _is_indexer(part: nn.Module) -> bool:
    return "indexer" in type(part).__name__.lower()


def _selects(part: nn.Module) -> bool:
    # MLX keeps lists and the like in the module, other values in its dict.
    facts = {**vars(part), **part}
    counts = (_COUNT.search(name) and facts[name] is not None for name in facts)
    return any(counts) or _is_indexer(part)
