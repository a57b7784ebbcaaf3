"""Parts of a model that behave otherwise.

MLX modules have no hooks: what a module does is its class's, and so a part is made one
of a subclass of its own class.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.nn as nn


def subclass(kind: type, /, **members: Any) -> type:
    """A class with the name of ``kind``, of which ``members`` alone are other.

    Classes live until the next collection of garbage: a member must not hold weights.
    """
    return type(kind.__name__, (kind,), members)


def copied_as(part: nn.Module, kind: type) -> nn.Module:
    """A copy of a part that is one of ``kind``; its weights and parts are the same."""
    copied = copy.copy(part)
    copied.__class__ = kind
    return copied


@contextmanager
def hooked(parts: Iterable[tuple[nn.Module, type]]) -> Iterator[None]:
    """Have each part be of its subclass for a block, however that ends.

    A copy that is made inside stays one of the subclass.
    """
    parts = list(parts)
    before = [type(part) for part, _ in parts]
    try:
        for part, kind in parts:
            part.__class__ = kind
        yield
    finally:
        for (part, _), kind in zip(parts, before):
            part.__class__ = kind
