"""Small random DSA models, in memory or as folders that plain mlx-lm loads."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

KINDS = ("deepseek_v32", "glm_moe_dsa")
INDEX_TOPK = 16
# Enough for few scores, or none, to tie at a sum of nought.
MANY_HEADS = {"index_n_heads": 24}
END = "<|end|>"

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def config(kind: str, index_topk: int = INDEX_TOPK) -> dict:
    """A configuration as a checkpoint of that kind has it, in small."""
    shared = dict(
        model_type=kind,
        vocab_size=260,
        hidden_size=64,
        index_head_dim=32,
        index_n_heads=4,
        index_topk=index_topk,
        intermediate_size=96,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=4,
        routed_scaling_factor=1.0,
        kv_lora_rank=32,
        q_lora_rank=64,
        qk_rope_head_dim=16,
        v_head_dim=32,
        qk_nope_head_dim=32,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_layer_freq=1,
        first_k_dense_replace=1,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        attention_bias=False,
        eos_token_id=256,
    )
    if kind == "glm_moe_dsa":
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        return {**shared, "rope_parameters": rope}
    return {**shared, "rope_theta": 10000.0}


def make(
    kind: str = "deepseek_v32",
    index_topk: int = INDEX_TOPK,
    seed: int = 0,
    dtype: mx.Dtype = mx.float32,
    bits: int | None = None,
    **more,
) -> nn.Module:
    """A model of random weights, in groups of 32 where ``bits`` are given.

    ``more`` goes before what ``config`` says.
    """
    upstream = importlib.import_module(f"mlx_lm.models.{kind}")
    mx.random.seed(seed)
    facts = {**config(kind, index_topk), **more}
    if dtype != mx.float32:
        # mlx's CPU backend multiplies experts in float32 only.
        facts["first_k_dense_replace"] = facts["num_hidden_layers"]
    model = upstream.Model(upstream.ModelArgs.from_dict(facts))
    spread(model, dtype)
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
    mx.eval(model.parameters())
    return model


def tokens(seed: int, length: int) -> list[int]:
    """Random bytes."""
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def logits(
    model: nn.Module, tokens: list[int], cuts: Iterable[int], cache: list | None = None
) -> np.ndarray:
    """(L, vocabulary) of one sequence, fed in calls of so many tokens as ``cuts``."""
    cache = make_prompt_cache(model) if cache is None else cache
    rows, rest = [], mx.array([tokens])
    for length in cuts:
        rows.append(model(rest[:, :length], cache=cache))
        rest = rest[:, length:]
    return np.array(mx.concatenate(rows, axis=1)[0].astype(mx.float32))


def spread(model: nn.Module, dtype: mx.Dtype = mx.float32) -> None:
    """Weights that set logits apart: with upstream's, noise would decide."""
    weights = [
        (name, (mx.random.normal(value.shape) / value.shape[-1] ** 0.5).astype(dtype))
        if value.ndim > 1
        else (name, value.astype(dtype))
        for name, value in tree_flatten(model.parameters())
    ]
    model.load_weights(weights)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([END])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=END, chat_template=CHAT_TEMPLATE
    )


def write_folder(
    folder: Path,
    kind: str = "deepseek_v32",
    index_topk: int = INDEX_TOPK,
    seed: int = 0,
    bits: int | None = None,
    without: Iterable[int] = (),
    **more,
) -> Path:
    """A model folder for ``--model``; returns ``folder``.

    Layers ``without`` an indexer have no weights of one, as shared layers in GLM-5.2's
    checkpoints; ``more`` goes before what ``config`` says.
    """
    facts = {**config(kind, index_topk), **more}
    if bits is not None:
        facts["quantization"] = {"group_size": 32, "bits": bits}
    model = make(kind, index_topk, seed, bits=bits, **more)
    left_out = tuple(f"model.layers.{layer}.self_attn.indexer." for layer in without)
    return save_folder(folder, facts, model, left_out)


def glm52(layers: int = 78) -> dict:
    """The schedule of GLM-5.2: layers 0, 1 and 2 are full, then one in four."""
    kinds = ["full" if max(i - 2, 0) % 4 == 0 else "shared" for i in range(layers)]
    return {"num_hidden_layers": layers, "indexer_types": kinds}


def shared_layers(facts: dict) -> list[int]:
    """Numbers of the layers that ``indexer_types`` marks as shared."""
    kinds = facts.get("indexer_types", ())
    return [layer for layer, kind in enumerate(kinds) if kind == "shared"]


LLAMA = dict(
    model_type="llama",
    vocab_size=260,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    rms_norm_eps=1e-5,
    eos_token_id=256,
)


def make_llama(seed: int = 0, **facts) -> llama.Model:
    """A model that selects nothing; ``facts`` go before ``LLAMA``'s."""
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs.from_dict({**LLAMA, **facts}))
    spread(model)
    mx.eval(model.parameters())
    return model


def write_llama_folder(folder: Path, **facts) -> Path:
    """The same as a folder; returns ``folder``."""
    return save_folder(folder, {**LLAMA, **facts}, make_llama(**facts))


def only_letters(tokenizer) -> dict[int, float]:
    """A bias to printable ASCII: then text and tokens tell the same."""
    shown = [tokenizer.decode([token]) for token in range(260)]
    plain = [len(t) == 1 and t.isascii() and t.isprintable() for t in shown]
    return {token: -1e4 for token, keep in enumerate(plain) if not keep}


def save_folder(
    folder: Path, facts: dict, model: nn.Module, left_out: tuple[str, ...] = ()
) -> Path:
    """Write a model as mlx-lm's own converter does; returns ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(facts))
    weights = {
        name: weight
        for name, weight in tree_flatten(model.parameters())
        if not name.startswith(left_out)
    }
    file = folder / "model.safetensors"
    mx.save_safetensors(str(file), weights, {"format": "mlx"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, file.name)}
    file.with_suffix(".safetensors.index.json").write_text(json.dumps(index))
    tokenizer().save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Folder:
    """A model's folder, and what is asked of it here and of its server alike."""

    folder: str
    tokenizer: object
    max_tokens: int

    @property
    def only_letters(self) -> dict[int, float]:
        return only_letters(self.tokenizer)

    @property
    def options(self) -> dict:
        """Of a generation in this process."""
        biased = make_logits_processors(self.only_letters)
        return {"max_tokens": self.max_tokens, "logits_processors": biased}

    def request(self, prompt, **more):
        fixed = {"max_tokens": self.max_tokens, "temperature": 0}
        return {"prompt": prompt, "logit_bias": self.only_letters, **fixed, **more}

    def complete(self, server, prompt, **more) -> tuple[str, int]:
        """A server's text, and the number of tokens that it had cached."""
        status, answer = server.complete(**self.request(prompt, **more))
        assert status == 200, answer
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["text"], cached

    def complete_together(self, server, prompts) -> list[str]:
        """A server's texts of requests that it takes up together.

        A request with a seed is served alone: what comes meanwhile is queued.
        """
        first = self.request("Wait.", max_tokens=300, seed=0, stream=True)
        pool = ThreadPoolExecutor(len(prompts))
        with server.completion(**first) as response, pool:
            assert response.readline()
            answers = pool.map(lambda prompt: self.complete(server, prompt), prompts)
            response.read()
            return [text for text, _ in answers]
