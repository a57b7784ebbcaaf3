"""Files of a checkpoint: a hub id's on this disk, and whether all are there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

# mlx-lm fetches these, in each release that is supported, and leaves others out.
_CONFIGURATIONS, _WEIGHTS = "*.json", "model*.safetensors"


def local_snapshot(name: str) -> Path | None:
    """The folder of a hub id's files; ``None`` where they aren't on this disk whole.

    Needed are configurations and weights: huggingface_hub 2 remembers what a repository
    has, and refuses a folder without its README. The network is never asked.

    Raises
    ------
    OSError, ValueError
        Files that can't be read.
    """
    patterns = [_CONFIGURATIONS, _WEIGHTS]
    try:
        found = snapshot_download(name, local_files_only=True, allow_patterns=patterns)
    except (LocalEntryNotFoundError, ValueError):
        return None
    # Where nothing was remembered, a download that was cut short is found too.
    folder = Path(found)
    weights = [*folder.glob(_WEIGHTS)]
    needed = [folder / "config.json", *weights]
    is_whole = weights and all(file.is_file() for file in needed)
    return folder if is_whole and not missing_files(folder) else None


def missing_files(folder: Path) -> set[str]:
    """Files of weights that a checkpoint's index names and that aren't there.

    Raises
    ------
    OSError, ValueError
        An index that can't be read.
    """
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return set()
    files = read_json(index).get("weight_map", {})
    if not isinstance(files, dict):
        raise ValueError(f"{index} is damaged: its weight_map names no files")
    return {name for name in map(str, files.values()) if not (folder / name).is_file()}


def read_json(file: Path) -> dict[str, Any]:
    """A configuration or an index.

    Raises
    ------
    OSError, ValueError
        It can't be read.
    """
    try:
        content = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} is no configuration")
    return content
