"""A checkpoint's files: where a hub id's are on this disk, and whether all are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

# The files needed here: every supported mlx-lm release fetches them.
_CONFIGURATIONS, _WEIGHTS = "*.json", "model*.safetensors"


def local_snapshot(name: str) -> Path | None:
    """The folder of a hub id's files; ``None`` where not all are on this disk.

    Only configurations and weights are needed. Without that limit huggingface_hub 2
    refuses a folder that lacks a repository's README. The network is never asked.

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
    # Where huggingface_hub remembers no file list, it finds an incomplete download too.
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
