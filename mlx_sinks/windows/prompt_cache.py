"""A prompt cache whose plain layers have a window with sinks."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as upstream

from ..logger import warn
from ..upstream.caches import fresh_caches, kinds, plain_layers
from .rotation import Rotation
from .sink_cache import SinkCache
from .window import Window

POSITION_MODES = ("absolute", "local")


def make_sink_cache(
    model: nn.Module,
    window: int,
    *,
    sinks: int = 4,
    position_mode: str = "absolute",
) -> list[Any]:
    """A prompt cache whose layers keep the sinks and the newest tokens.

    Pass it as ``prompt_cache`` anywhere in mlx-lm. Source: Xiao et al. 2023, "Efficient
    Streaming Language Models with Attention Sinks" (StreamingLLM).

    Parameters
    ----------
    model : mlx.nn.Module
        A model of mlx-lm.
    window : int
        Number of tokens kept, sinks included.
    sinks : int, default=4
        First tokens of the sequence, kept for good.
    position_mode : str, default="absolute"
        ``"absolute"``: keys keep the position that they were read at; none is ever
        moved. ``"local"``: distances count kept tokens only, and positions stay bounded
        on endless streams. To learn each layer's rotation, the model reads one token at
        two positions.

    Returns
    -------
    list
        A ``SinkCache`` for each layer with a plain ``KVCache`` of its own. The other
        layers (sliding, recurrent, sparse) keep upstream's cache; a warning names its
        kinds.

    Raises
    ------
    ValueError
        An impossible window, an unknown mode, a model without a plain layer, or, in
        ``local``, a rope whose rotations don't add up.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an mlx.nn.Module, not {model!r}")
    Window(window, sinks)
    if position_mode not in POSITION_MODES:
        known = " or ".join(map(repr, POSITION_MODES))
        raise ValueError(f"position_mode must be {known}, not {position_mode!r}")
    rotations: dict[int, Rotation | None] = {}
    caches = fresh_caches(model)
    plain = plain_layers(model, caches)
    if not plain:
        raise ValueError(
            f"{type(model).__module__} has no layer for a window: "
            f"{_kinds(model, caches, plain)}"
        )
    if position_mode == "local":
        rotations = _rotations(model, plain)
    for layer in plain:
        caches[layer] = SinkCache(window, sinks, rotations.get(layer))
    if len(plain) < len(caches):
        warn(
            f"the window reaches {len(plain)} of {len(caches)} layers; the others keep "
            f"upstream's cache: {_kinds(model, caches, plain)}",
        )
    return caches


def _kinds(model: nn.Module, caches: list[Any], plain: list[int]) -> str:
    others = kinds(c for n, c in enumerate(caches) if n not in plain)
    layers = len(model.layers)
    return others if len(caches) == layers else f"{others} for {layers} layers"


class _Capture(upstream._BaseCache):
    """Captures what a layer stores of one token, which sees only itself."""

    def __init__(self, offset: int):
        self.offset = offset

    def update_and_fetch(self, keys, values):
        self.captured = keys, values
        return keys, values

    def make_mask(self, *arguments: Any, **named: Any) -> None:
        return None


def _rotations(model: nn.Module, plain: list[int]) -> dict[int, Rotation | None]:
    """How each plain layer's rope moves keys, tried on the model itself.

    A token that sees only itself has the same hidden states at every position. So what
    a layer stores of it at two positions differs by the rotation alone. Latent
    attention stores its rotated part among the values, which can't be moved: it is
    refused.
    """
    far = 1000
    here, there = (_captured(model, plain, offset) for offset in (0, far))
    rotations: dict[int, Rotation | None] = {}
    for layer in plain:
        (keys, values), (far_keys, far_values) = here[layer], there[layer]
        parts = model.layers[layer].modules()
        ropes = [part for part in parts if _is_rope(type(part).__name__)]
        if not mx.array_equal(values, far_values).item():
            fitting = []
        elif mx.array_equal(keys, far_keys).item():
            fitting = [None]  # a layer without positions
        else:
            tried = map(Rotation.of, ropes)
            fitting = [r for r in tried if _close(r.turn(keys, [far]), far_keys)]
        if not fitting:
            names = " and ".join(sorted({type(rope).__name__ for rope in ropes}))
            reason = f"{names} doesn't account for what it stores"
            raise ValueError(
                f"position_mode='local' can't move the keys of layer {layer} of "
                f"{type(model).__module__}: "
                f"{reason if ropes else 'it has no rope'}; use 'absolute'"
            )
        rotations[layer] = fitting[0]
    return rotations


def _captured(
    model: nn.Module, plain: list[int], offset: int
) -> dict[int, tuple[mx.array, mx.array]]:
    caches = fresh_caches(model)
    for layer in plain:
        caches[layer] = _Capture(offset)
    model(mx.zeros((1, 1), mx.int32), cache=caches)
    return {layer: caches[layer].captured for layer in plain}


def _is_rope(name: str) -> bool:
    return any(word in name.lower() for word in ("rope", "rotary"))


def _close(expected: mx.array, keys: mx.array) -> bool:
    """Whether keys are equal up to the rounding of their dtype and of the angle."""
    expected, keys = (array.astype(mx.float32) for array in (expected, keys))
    error = mx.linalg.norm(expected - keys) / mx.linalg.norm(keys)
    return error.item() < 0.02
