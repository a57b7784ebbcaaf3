"""A llama model's weights as an exact checkpoint of a DeepSeek or GLM architecture.

Their attention (MLA) projects to latents, norms those and projects on; keys have a
rotary part that all heads share, and a part without positions. It computes what llama's
grouped heads compute, to rounding, when

- each ``input_layernorm`` has weight one, its weight being moved behind it, and the
  latents are that norm's output, ``LATENT`` times: so small that the epsilon of the
  latents' own norm rules there, which makes it linear;
- the shared rotary key has the dims of all groups one after another, and each head's
  query its own group's, zeros elsewhere;
- the part without positions is zero.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

KINDS = ("deepseek_v32", "glm_moe_dsa")
# What a llama may have, and these kinds can't express.
BEYOND = (
    *("attention_bias", "mlp_bias", "rope_traditional", "rope_scaling"),
    *("sliding_window", "quantization"),
)
LATENT = 2.0**-13  # a power of two: every float type has it
LATENT_EPS = 1e-6  # upstream's, of the norms of latents
NOPE_DIMS = 32  # all zero; upstream's kernels want some


def mla_config(llama: dict[str, Any], kind: str) -> dict[str, Any]:
    """The ``config.json`` of that model as one of ``KINDS``, without indexers.

    Raises
    ------
    ValueError
        A llama that these kinds can't express.
    """
    _check(llama)
    heads, groups = llama["num_attention_heads"], llama["num_key_value_heads"]
    hidden, theta = llama["hidden_size"], llama["rope_theta"]
    dims = hidden // heads
    # Upstream's frequencies fall over the dims of all groups, llama's over one group's.
    pairs = dims // 2
    factors = [
        theta ** (2 * (pair % pairs) / dims - 2 * pair / (groups * dims))
        for pair in range(groups * pairs)
    ]
    length = llama["max_position_embeddings"]
    rope = {
        "rope_type": "longrope",
        "rope_theta": theta,
        "factor": 1.0,
        "original_max_position_embeddings": length,
        "short_factor": factors,
        "long_factor": factors,
    }
    same = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "rms_norm_eps", "max_position_embeddings"),
        *("bos_token_id", "eos_token_id", "rope_theta"),
    )
    return {
        "model_type": kind,
        **{name: llama[name] for name in same if name in llama},
        "num_key_value_heads": heads,
        "q_lora_rank": hidden,
        "kv_lora_rank": hidden,
        "qk_nope_head_dim": NOPE_DIMS,
        "qk_rope_head_dim": groups * dims,
        "v_head_dim": dims,
        "attention_bias": False,
        "tie_word_embeddings": False,
        ("rope_parameters" if kind == "glm_moe_dsa" else "rope_scaling"): rope,
        # No layer has experts; transformers wants to read counts of them.
        "first_k_dense_replace": llama["num_hidden_layers"],
        "moe_layer_freq": 1,
        "moe_intermediate_size": llama["intermediate_size"],
        "n_routed_experts": 1,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        # Pairs of dims of longrope are always those of two halves.
        "indexer_rope_interleave": False,
    }


def _check(llama: dict[str, Any]) -> None:
    beyond = [name for name in BEYOND if llama.get(name)]
    own = llama["hidden_size"] / llama["num_attention_heads"]
    if llama.get("head_dim") not in (None, own):
        beyond.append("head_dim")
    if beyond:
        raise ValueError(
            f"this llama can't be a DeepSeek model: it has {', '.join(beyond)}"
        )
    if not llama.get("max_position_embeddings"):
        raise ValueError("this llama's config.json lacks max_position_embeddings")


def mla_weights(
    llama: dict[str, mx.array], config: dict[str, Any]
) -> dict[str, mx.array]:
    """Weights of ``mla_config``'s model, in the names of DeepSeek's checkpoints."""
    weights = {"lm_head.weight": llama["model.embed_tokens.weight"]}
    for name, weight in llama.items():
        layer, attention, part = name.partition("self_attn.")
        if name.endswith("input_layernorm.weight"):
            weights[name] = mx.ones_like(weight)
        elif not attention or part == "o_proj.weight":
            weights[name] = weight
        elif part == "q_proj.weight":
            norm = llama[f"{layer}input_layernorm.weight"]
            qkv = (llama[f"{layer}self_attn.{part}_proj.weight"] for part in "qkv")
            for part, weight in _attention(norm, *qkv, config).items():
                weights[f"{layer}self_attn.{part}.weight"] = weight
    return weights


def _attention(
    norm: mx.array, q: mx.array, k: mx.array, v: mx.array, config: dict[str, Any]
) -> dict[str, mx.array]:
    """One layer's weights from the llama's projections and the norm before them.

    The norm's weight goes into queries and keys. Values have a norm of their own, which
    takes it: 4-bit weights lose less when their columns keep their size.
    """
    heads, dims = config["num_attention_heads"], config["v_head_dim"]
    hidden, rope = config["hidden_size"], config["qk_rope_head_dim"]
    groups = rope // dims
    latent = LATENT * mx.eye(hidden)
    linear = (1 + LATENT_EPS / LATENT**2) ** 0.5
    # A head's place among the groups; the dims of a head are two halves (axis 1).
    own = mx.eye(groups)[mx.arange(heads) // (heads // groups)]
    queries = (q * norm).reshape(heads, 2, 1, dims // 2, hidden)
    queries = (queries * own[:, None, :, None, None]).reshape(heads, rope, hidden)
    # Upstream divides by the root of all dims of a head.
    queries = queries * ((NOPE_DIMS + rope) / dims) ** 0.5
    keys = (k * norm).reshape(groups, 2, dims // 2, hidden).swapaxes(0, 1)
    values = v.reshape(groups, dims, hidden)
    values = mx.repeat(values, heads // groups, axis=0)

    def beside_nope(rows: mx.array) -> mx.array:
        return mx.pad(rows, [(0, 0), (NOPE_DIMS, 0), (0, 0)]).reshape(-1, hidden)

    return {
        "q_a_proj": latent,
        "q_a_layernorm": mx.full((hidden,), linear),
        "q_b_proj": beside_nope(queries),
        "kv_a_proj_with_mqa": mx.concatenate([latent, keys.reshape(rope, hidden)]),
        "kv_a_layernorm": linear * norm,
        "kv_b_proj": beside_nope(values),
    }
