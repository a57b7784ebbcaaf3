"""What the doctor concluded, and checkpoints of which only headers exist."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def causes(result: Mapping[str, Any]) -> list[str]:
    """Causes of the verdicts that are something to mend."""
    return [verdict["cause"] for verdict in result["verdicts"] if verdict["wrong"]]


def said(result: Mapping[str, Any]) -> list[str]:
    """Causes of all verdicts."""
    return [verdict["cause"] for verdict in result["verdicts"]]


def write_headers(
    folder: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, tuple[str, list[int]]],
    **files: Any,
) -> Path:
    """A folder with a configuration and the header of its weights; returns it.

    ``weights`` has a dtype and a shape for each name; ``files`` are more JSON files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    entries = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}
        for name, (dtype, shape) in weights.items()
    }
    header = json.dumps(entries).encode()
    file = folder / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    for name, facts in {"config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(facts))
    return folder


def indexer_weights(
    layers: list[int], names: Mapping[str, Mapping[str, tuple[str, list[int]]]]
) -> dict[str, tuple[str, list[int]]]:
    """Weights of indexers: for each part, such as ``wq_b``, its arrays."""
    return {
        f"model.layers.{layer}.self_attn.indexer.{part}.{name}": array
        for layer in layers
        for part, arrays in names.items()
        for name, array in arrays.items()
    }
