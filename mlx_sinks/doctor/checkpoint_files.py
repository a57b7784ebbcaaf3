"""What is in a checkpoint, by its configuration and the headers of its files."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download

from ..sparse.schedule import INTERLEAVES, whole
from ..upstream.hub import local_snapshot, missing_files, read_json

_INDEXER = re.compile(r"model\.layers\.(\d+)\.self_attn\.indexer\.(\w+)\.(\w+)")
# The weights of upstream's Indexer; quantised projections have more.
_PARTS = {"wq_b.weight", "wk.weight", "weights_proj.weight"}
_PARTS |= {"k_norm.weight", "k_norm.bias"}
# How formats call a projection's weight: AWQ and GPTQ, compressed-tensors.
_PACKED = {"qweight": "AWQ or GPTQ", "weight_packed": "compressed-tensors"}
# What else they keep of it, by which they are told apart.
_NVFP4 = "weight_scale_2"
# Counts that a configuration with indexers must have, and that it may have.
_NEEDED = ("num_hidden_layers", "hidden_size", "q_lora_rank")
_OPTIONAL = {"index_topk", "index_n_heads", "index_head_dim"}
_OPTIONAL |= {"max_position_embeddings"}
# Most bytes that a header may have: a file of another format may claim any number.
_LONGEST_HEADER = 100_000_000

Weights = dict[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Checkpoint:
    """A configuration and, by name, the dtype and shape of each weight."""

    name: str
    config: dict[str, Any]
    weights: Weights
    # ModelOpt's hf_quant_config.json, where there is one.
    quantised_apart: dict[str, Any] | None = None

    @property
    def kind(self) -> str:
        return self.config["model_type"]

    @property
    def selects(self) -> bool:
        """Whether it is of a kind with indexers that mlx-lm's own code builds."""
        return self.kind in INTERLEAVES and self.own_code is None

    @property
    def own_code(self) -> str | None:
        """The file of an architecture of its own, which its folder carries."""
        return self.config.get("model_file")

    @property
    def mentions_selection(self) -> list[str]:
        """What hints at a learned selection, whatever the model's kind."""
        configs = [self.config, self.config.get("text_config")]
        keys = {
            key
            for config in configs
            if isinstance(config, dict)
            for key, value in config.items()
            if re.search("index_topk|indexer|sparse_attention", key)
            and value not in (None, False, 0)
        }
        weights = sum("indexer" in name for name in self.weights)
        said = [f"{weights:,} weights of indexers"] if weights else []
        return [*sorted(keys), *said]

    @property
    def quantisation(self) -> dict[str, Any] | None:
        """What says how the weights are quantised, as mlx-lm looks for it."""
        texts = self.config.get("text_config")
        for config in (self.config, texts if isinstance(texts, dict) else {}):
            if isinstance(stated := config.get("quantization_config"), dict):
                return stated
        if self.quantised_apart is None:
            return None
        stated = self.quantised_apart.get("quantization")
        stated = stated if isinstance(stated, dict) else {}
        return {"quant_method": "modelopt", **stated}

    def indexers(self) -> dict[int, set[str]]:
        """For each layer, the parts of its indexer that have weights."""
        found: dict[int, set[str]] = {}
        for layer, part, name, _ in self._indexer_weights:
            name = "weight" if name in _PACKED else name
            found.setdefault(layer, set()).add(f"{part}.{name}")
        return found

    def whole_indexers(self) -> set[int]:
        """Numbers of the layers that have all weights of an indexer."""
        return {layer for layer, parts in self.indexers().items() if parts >= _PARTS}

    def indexer_formats(self) -> dict[str, int]:
        """For each format, how many projections of indexers are stored in it."""
        beside: dict[tuple[int, str], set[str]] = {}
        for layer, part, name, _ in self._indexer_weights:
            beside.setdefault((layer, part), set()).add(name)
        return dict(
            Counter(
                self._format(part, name, weight, beside[layer, part])
                for layer, part, name, weight in self._indexer_weights
                if name in ("weight", *_PACKED) and len(weight[1]) == 2
            )
        )

    @functools.cached_property
    def _indexer_weights(self) -> list[tuple[int, str, str, tuple]]:
        """Layer, part, its weight's name, and the dtype and shape in the header."""
        found = ((_INDEXER.fullmatch(name), w) for name, w in self.weights.items())
        return [
            (int(match[1]), match[2], match[3], weight)
            for match, weight in found
            # Layers past the last are for multi-token prediction; nobody runs them.
            if match and int(match[1]) < self.config["num_hidden_layers"]
        ]

    def _format(
        self, part: str, name: str, weight: tuple[str, tuple[int, ...]], all: set[str]
    ) -> str:
        """The dtype, such as ``BF16``; of quantised weights whose format, and bits."""
        dtype, shape = weight
        inputs = self.config["q_lora_rank" if part == "wq_b" else "hidden_size"]
        if name in _PACKED:
            method = (self.quantisation or {}).get("quant_method", _PACKED[name])
            # AWQ packs outputs, the others inputs.
            values = shape[0] * shape[1] * 32 // inputs
            outputs = self._outputs(part)
            bits = f"{values // outputs}-bit " if values % outputs == 0 else ""
            return f"{bits}{method}"
        if _NVFP4 in all:
            return "NVFP4"
        return f"{shape[1] * 32 // inputs}-bit" if dtype == "U32" else dtype

    def _outputs(self, part: str) -> int:
        heads = self.config.get("index_n_heads", 64)
        head_dim = self.config.get("index_head_dim", 128)
        return {"wq_b": heads * head_dim, "wk": head_dim}.get(part, heads)


def read_checkpoint(name: str) -> Checkpoint:
    """The configuration and headers in a folder or on the hub; no weights are loaded.

    Raises
    ------
    OSError, ValueError
        No such checkpoint, or files that are damaged or no checkpoint.
    """
    folder = _folder(name)
    if folder is None:
        return _from_hub(name)
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{name} has no config.json: it is no checkpoint")
    weights: Weights = {}
    for part in sorted(folder.glob("model*.safetensors")):
        weights.update(_header(part))
    if missing := missing_files(folder):
        raise ValueError(
            f"{name} is not whole: {', '.join(sorted(missing)[:3])} missing"
        )
    return _checked(name, file, weights)


def _folder(name: str) -> Path | None:
    """Where a checkpoint lies on this machine, if it does."""
    if Path(name).is_dir():
        return Path(name)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ValueError(f"{name} is neither a folder nor a hub id")
    return local_snapshot(name)


def _header(file: Path) -> Weights:
    """Names, dtypes and shapes of a safetensors file, without its data."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        try:
            if length > _LONGEST_HEADER:
                raise ValueError("its header is too long")
            header = json.loads(opened.read(length))
            return {
                name: (str(entry["dtype"]), tuple(map(int, entry["shape"])))
                for name, entry in header.items()
                if name != "__metadata__"
            }
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} is no safetensors file: {error}") from None


def _from_hub(name: str) -> Checkpoint:
    try:
        config = Path(hf_hub_download(name, "config.json"))
        files = HfApi().get_safetensors_metadata(name).files_metadata.values()
    except Exception as error:  # of the hub, the network or its libraries
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ValueError(
            f"there is no folder {name}, and it can't be read from the hub: {reason}"
        ) from None
    weights = {
        tensor: (info.dtype, tuple(info.shape))
        for file in files
        for tensor, info in file.tensors.items()
    }
    return _checked(name, config, weights)


def _checked(name: str, file: Path, weights: Weights) -> Checkpoint:
    """A checkpoint, after a check that its configuration has what the doctor reads."""
    config = read_json(file)
    if not isinstance(config.get("model_type"), str):
        raise ValueError(f"{name}/config.json names no model_type")
    if not weights:
        raise ValueError(f"{name} has no model*.safetensors")
    apart = file.with_name("hf_quant_config.json")
    quantised = read_json(apart) if apart.is_file() else None
    checkpoint = Checkpoint(name, config, weights, quantised)
    if checkpoint.selects:
        for key in (*_NEEDED, *_OPTIONAL & config.keys()):
            whole(f"{name}/config.json: {key}", config.get(key), 1)
    return checkpoint
