"""Finished parts of a long run, kept in files: an interrupted run goes on there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlx_sinks.upstream.hub import local_snapshot
from tools.output import write_json


def finished(
    path: Path | None, facts: dict[str, Any], compute: Callable[[], dict]
) -> dict:
    """The result of an earlier run with the same facts, or a new one that is kept."""
    if path is not None and path.exists():
        # Whatever else lies there under that name is replaced.
        with suppress(ValueError, TypeError, KeyError):
            kept = json.loads(path.read_text())
            if kept["facts"] == facts:
                return kept["result"]
    result = compute()
    if path is not None:
        write_json(path, {"facts": facts, "result": result})
    return result


def model_files(model: str) -> dict[str, Any]:
    """What tells whether a loaded model is still that of an earlier run.

    Its own small files by their content, weights by size and date.
    """
    path = Path(model) if Path(model).is_dir() else local_snapshot(model)
    if path is None:
        raise ValueError(f"{model} is neither a folder nor a model on this disk")
    facts: dict[str, Any] = {}
    for file in sorted(path.iterdir()):
        if file.suffix == ".safetensors":
            facts[file.name] = [file.stat().st_size, file.stat().st_mtime_ns]
        elif file.suffix in (".json", ".py", ".jinja"):
            facts[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return facts
