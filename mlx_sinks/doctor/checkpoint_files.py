"""What is in a checkpoint, by its configuration and the headers of its files."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

_INDEXER = re.compile(r"model\.layers\.(\d+)\.self_attn\.indexer\.(\w+)\.(\w+)")
# Bytes that a header may have: a wrong file's first eight say anything.
_LONGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class Checkpoint:
    """A configuration and, by name, the dtype and shape of each weight."""

    name: str
    config: dict[str, Any]
    weights: dict[str, tuple[str, tuple[int, ...]]]

    def indexer_layers(self) -> set[int]:
        """Numbers of the layers that have weights of an indexer."""
        found = map(_INDEXER.match, self.weights)
        layers = {int(match.group(1)) for match in found if match}
        return {n for n in layers if n < self.config["num_hidden_layers"]}

    def indexer_formats(self) -> dict[str, int]:
        """How many projections of indexers are stored in which format."""
        formats: Counter[str] = Counter()
        for name, (dtype, shape) in self.weights.items():
            match = _INDEXER.match(name)
            if match and match.group(3) == "weight" and len(shape) == 2:
                formats[self._format(match.group(2), dtype, shape)] += 1
        return dict(formats)

    def _format(self, projection: str, dtype: str, shape: tuple[int, ...]) -> str:
        """``BF16`` and the like, or the bits of what mlx has quantised."""
        if dtype != "U32":
            return dtype
        inputs = self.config["q_lora_rank" if projection == "wq_b" else "hidden_size"]
        return f"{shape[1] * 32 // inputs}-bit"


def read_checkpoint(name: str) -> Checkpoint:
    """The headers of a folder or a hub id; of the hub only headers are loaded.

    Raises
    ------
    OSError, ValueError
        No such checkpoint, or files that are damaged or no checkpoint.
    """
    folder = _folder(name)
    if folder is None:
        return _from_hub(name)
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise ValueError(f"{name} has no config.json: it is no checkpoint") from None
    except ValueError as error:
        raise ValueError(f"{name}/config.json is damaged: {error}") from None
    weights: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        weights.update(_header(file))
    return _checked(name, config, weights)


def _folder(name: str) -> Path | None:
    """Where a checkpoint lies on this machine, if it does."""
    if Path(name).is_dir():
        return Path(name)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ValueError(f"{name} is neither a folder nor a hub id")
    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        return None
    # A download that was cut short is there too.
    return folder if any(folder.glob("model*.safetensors")) else None


def _header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names, dtypes and shapes of a safetensors file, without its data."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        try:
            if length > _LONGEST_HEADER:
                raise ValueError("its header is too long")
            header = json.loads(opened.read(length))
            return {
                name: (entry["dtype"], tuple(entry["shape"]))
                for name, entry in header.items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} is no safetensors file: {error}") from None


def _from_hub(name: str) -> Checkpoint:
    try:
        config = json.loads(Path(hf_hub_download(name, "config.json")).read_text())
        files = HfApi().get_safetensors_metadata(name).files_metadata.values()
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error).splitlines()[0] or type(error).__name__
        raise ValueError(f"can't read {name} from the hub: {reason}") from None
    weights = {
        tensor: (info.dtype, tuple(info.shape))
        for file in files
        for tensor, info in file.tensors.items()
    }
    return _checked(name, config, weights)


def _checked(name: str, config: Any, weights: dict) -> Checkpoint:
    if not isinstance(config, dict) or "model_type" not in config:
        raise ValueError(f"{name}/config.json names no model_type")
    if not weights:
        raise ValueError(f"{name} has no model*.safetensors")
    return Checkpoint(name, config, weights)
