"""What mlx-lm builds from a configuration: its classes say whether keys are selected.

MLX makes no array before somebody looks at it: a model of 400 GB is built in
milliseconds and takes no memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

import mlx.nn as nn
from mlx_lm import utils

from .checkpoint_files import Checkpoint


class NotBuilt(ValueError):
    """A configuration from which this mlx-lm builds no model; the message says why."""


def built(config: Mapping[str, Any]) -> nn.Module:
    """The model of a configuration, with no weights.

    Raises
    ------
    NotBuilt
        mlx-lm knows no such kind, or can't read the configuration.
    """
    model_class, args_class = _classes(config)
    try:
        return model_class(args_class.from_dict(dict(config)))
    except Exception as error:  # whatever upstream raises for what stands there
        raise NotBuilt(f"{type(error).__name__}: {error}") from None


def arguments(config: Mapping[str, Any]) -> Any:
    """What mlx-lm reads of a configuration.

    Raises
    ------
    NotBuilt
        As from ``built``.
    """
    _, args_class = _classes(config)
    try:
        return args_class.from_dict(dict(config))
    except Exception as error:
        raise NotBuilt(f"{type(error).__name__}: {error}") from None


def _classes(config: Mapping[str, Any]) -> tuple[type, type]:
    # How mlx-lm finds them is the default of a parameter.
    parameters = inspect.signature(utils.load_model).parameters
    try:
        return parameters["get_model_classes"].default(config=dict(config))
    except Exception as error:
        raise NotBuilt(str(error).rstrip(".")) from None


def unreadable_quantisation(checkpoint: Checkpoint) -> str | None:
    """How weights are quantised that this mlx-lm can't load; ``None`` if it can.

    mlx-lm goes by names in the code that loads a model, so the names in that code say
    what this release knows.
    """
    if checkpoint.config.get("quantization"):
        return None
    stated = checkpoint.quantisation
    if stated is None:
        packed = any(dtype == "U32" for dtype, _ in checkpoint.weights.values())
        return "nothing that config.json names" if packed else None
    method = str(stated.get("quant_method"))
    known = set(_strings(inspect.unwrap(utils.load_model).__code__))
    if method == "modelopt":
        algorithm = str(stated.get("quant_algo"))
        return None if {method, algorithm} <= known else f"{method} {algorithm}"
    if method == "fp8":  # some models restore these weights themselves
        sanitize = getattr(_classes(checkpoint.config)[0], "sanitize", None)
        code = getattr(inspect.unwrap(sanitize), "__code__", None)
        if code and "weight_scale_inv" in " ".join(_strings(code)):
            return None
    return None if method in known else method


def _strings(code: Any) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, (tuple, frozenset)):
            yield from (each for each in constant if isinstance(each, str))
        elif isinstance(constant, CodeType):
            yield from _strings(constant)
