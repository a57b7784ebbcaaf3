"""A view of a model: its attention layers show each cache their queries.

The view is a second tree of modules over the same weights. Where a layer calls mlx-lm's
attention kernel, the view's layer first calls the cache's ``observe``. The model itself
and all other models stay as they are.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import mlx.nn as nn

from ..upstream.hooks import copied_as, subclass
from ..upstream.kernel import KERNEL, calls_kernel, with_kernel


def observed(model: nn.Module) -> nn.Module:
    """A view of a model in which each cache's ``observe`` is given the layer's queries.

    Parameters
    ----------
    model : mlx.nn.Module
        A model of mlx-lm; its weights are shared, not copied.

    Returns
    -------
    mlx.nn.Module
        It computes what the model computes. It doesn't see weights that are replaced in
        the model afterwards.
    """
    return _view(model, {}, {})


def _view(value: Any, seen: dict[int, Any], classes: dict[type, type]) -> Any:
    """The view of a part; a module that the model uses twice has one view."""
    if isinstance(value, nn.Module):
        if id(value) not in seen:
            kind = type(value)
            if kind not in classes:
                classes[kind] = _observing_class(kind)
            seen[id(value)] = module = copied_as(value, classes[kind])
            for name, part in value.items():
                dict.__setitem__(module, name, _view(part, seen, classes))
        return seen[id(value)]
    if isinstance(value, dict):
        return {name: _view(part, seen, classes) for name, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_view(part, seen, classes) for part in value)
    return value


def _observing_class(kind: type) -> type:
    """A subclass of a module's class, whose calls of the kernel are observed."""
    members = {}
    for base in reversed(kind.__mro__):
        members.update(vars(base))
    ours = {
        name: _observing(each) for name, each in members.items() if calls_kernel(each)
    }
    return subclass(kind, **ours) if ours else kind


def _observing(function: types.FunctionType) -> types.FunctionType:
    kernel = function.__globals__[KERNEL]

    @functools.wraps(kernel)
    def observed_kernel(queries, keys, values, cache, scale, mask, sinks=None, **named):
        if observe := getattr(cache, "observe", None):
            observe(queries, keys, values, scale, mask, sinks)
        if sinks is not None:
            named["sinks"] = sinks
        return kernel(queries, keys, values, cache, scale, mask, **named)

    return with_kernel(function, observed_kernel)
