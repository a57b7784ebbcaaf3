"""What a checkpoint's configuration says of its indexers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FULL, SHARED = "full", "shared"
_LETTERS = {"F": FULL, "S": SHARED}

ROPE_KEY = "indexer_rope_interleave"
# Whether an indexer's RoPE pairs neighbouring dims where a configuration doesn't say:
# the values of DeepSeek's reference implementation and of GLM-5's checkpoints.
INTERLEAVES = {"deepseek_v32": False, "glm_moe_dsa": True}
# The epsilon of the LayerNorm of indexer keys in the reference implementations.
K_NORM_EPS = 1e-6


class CheckpointError(ValueError):
    """A configuration that no model can follow; the message names its key."""


def indexer_schedule(config: Mapping[str, Any]) -> tuple[str, ...] | None:
    """``"full"`` or ``"shared"`` for each layer, ``None`` where nothing is shared.

    A full layer selects with its own indexer, a shared one reuses the selection of the
    last full layer (IndexShare, arXiv:2603.12201; GLM-5.2 and later). As in the
    reference implementation ``indexer_types`` overrides ``index_topk_pattern``, and
    that overrides ``index_topk_freq`` with ``index_skip_topk_offset``.

    Parameters
    ----------
    config : mapping
        A checkpoint's ``config.json``.

    Raises
    ------
    CheckpointError
        The first layer is shared, there isn't one entry for each layer, or an entry is
        neither full nor shared.
    """
    layers = config["num_hidden_layers"]
    for name in ("indexer_types", "index_topk_pattern"):
        if (stated := config.get(name)) is not None:
            kinds = _kinds(name, stated)
            break
    else:
        name = "index_topk_freq"
        kinds = _spaced(layers, config)
    if len(kinds) != layers:
        raise CheckpointError(f"{name} has {len(kinds)} entries for {layers} layers")
    if kinds[0] != FULL:
        raise CheckpointError(
            f"{name} marks the first layer as shared: there is no selection to reuse"
        )
    return kinds if SHARED in kinds else None


def indexer_interleaves(config: Mapping[str, Any]) -> bool | None:
    """Whether the indexer's RoPE pairs neighbouring dims; ``None`` without indexers.

    Raises
    ------
    CheckpointError
        The configuration says neither true nor false.
    """
    usual, stated = INTERLEAVES.get(config.get("model_type")), config.get(ROPE_KEY)
    if stated is None:
        return usual
    if usual is not None and stated not in (True, False):
        raise CheckpointError(f"{ROPE_KEY} must be true or false, not {stated!r}")
    return bool(stated)


def _kinds(name: str, stated: Any) -> tuple[str, ...]:
    if not isinstance(stated, (str, list, tuple)) or not stated:
        raise CheckpointError(f"{name} must be a list of kinds, not {stated!r}")
    letters = _LETTERS if name == "index_topk_pattern" else {}
    kinds = [letters.get(k, k) if isinstance(k, str) else k for k in stated]
    for number, kind in enumerate(kinds):
        if kind not in (FULL, SHARED):
            raise CheckpointError(
                f"{name} marks layer {number} as {kind!r}, neither {FULL} nor {SHARED}"
            )
    return tuple(kinds)


def _spaced(layers: int, config: Mapping[str, Any]) -> tuple[str, ...]:
    """The first ``offset`` layers are full, then one layer in ``index_topk_freq``."""
    freq = max(_whole(config, "index_topk_freq", 1), 1)
    offset = _whole(config, "index_skip_topk_offset", 2)
    return tuple(
        SHARED if max(layer - offset + 1, 0) % freq else FULL for layer in range(layers)
    )


def _whole(config: Mapping[str, Any], name: str, otherwise: int) -> int:
    number = config.get(name)
    return otherwise if number is None else whole(name, number)


def whole(name: str, number: Any, least: int = 0) -> int:
    """Check a count that a configuration gives; some writers have 4.0 for 4.

    Raises
    ------
    CheckpointError
        It isn't a whole number of at least ``least``.
    """
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise CheckpointError(
            f"{name} must be a whole number >= {least}, not {number!r}"
        )
    return number
