"""Hooks for parts of a model.

MLX modules have no hooks. A module does what its class says, so a hook is a subclass
that a part is given.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.nn as nn


def subclass(kind: type, /, **members: Any) -> type:
    """A subclass with the name of ``kind``; only ``members`` differ.

    Classes live until the next collection of garbage: a member must not hold weights.
    """
    return type(kind.__name__, (kind,), members)


def copied_as(part: nn.Module, kind: type) -> nn.Module:
    """A shallow copy of a part, of the class ``kind``: it shares weights and parts."""
    copied = copy.copy(part)
    copied.__class__ = kind
    return copied


@contextmanager
def hooked(parts: Iterable[tuple[nn.Module, type]]) -> Iterator[None]:
    """Give each part its subclass for a ``with`` block, and its class back after it.

    A copy that is made inside keeps the subclass.
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
