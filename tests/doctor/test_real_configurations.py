"""The doctor on what published checkpoints say of themselves.

The facts are those of ``config.json`` and ``hf_quant_config.json`` that matter to a
loader; of the weights there are headers of the indexers alone.
"""

import mlx_lm
import pytest
from packaging.version import Version

from verdicts import causes, indexer_weights, said, write_headers

OLD = Version(mlx_lm.__version__) < Version("0.32")

SHARED = dict(
    attention_bias=False,
    ep_size=1,
    first_k_dense_replace=3,
    hidden_act="silu",
    index_head_dim=128,
    index_topk=2048,
    kv_lora_rank=512,
    moe_intermediate_size=2048,
    moe_layer_freq=1,
    n_routed_experts=256,
    n_shared_experts=1,
    norm_topk_prob=True,
    num_experts_per_tok=8,
    num_nextn_predict_layers=1,
    qk_rope_head_dim=64,
    routed_scaling_factor=2.5,
    scoring_func="sigmoid",
    tie_word_embeddings=False,
    topk_method="noaux_tc",
)
DEEPSEEK = dict(
    **SHARED,
    model_type="deepseek_v32",
    architectures=["DeepseekV32ForCausalLM"],
    hidden_size=7168,
    index_n_heads=64,
    intermediate_size=18432,
    max_position_embeddings=163840,
    n_group=8,
    num_attention_heads=128,
    num_hidden_layers=61,
    num_key_value_heads=128,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    rms_norm_eps=1e-6,
    rope_scaling={
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    rope_theta=10000,
    topk_group=4,
    v_head_dim=128,
    vocab_size=129280,
)
GLM = dict(
    **SHARED,
    model_type="glm_moe_dsa",
    architectures=["GlmMoeDsaForCausalLM"],
    head_dim=64,
    hidden_size=6144,
    index_n_heads=32,
    indexer_rope_interleave=True,
    intermediate_size=12288,
    max_position_embeddings=202752,
    n_group=1,
    num_attention_heads=64,
    num_hidden_layers=78,
    num_key_value_heads=64,
    q_lora_rank=2048,
    qk_head_dim=256,
    qk_nope_head_dim=192,
    rms_norm_eps=1e-5,
    rope_interleave=True,
    rope_parameters={"rope_theta": 1000000, "rope_type": "default"},
    topk_group=1,
    v_head_dim=256,
    vocab_size=154880,
)
FULL_OF_52 = [n for n in range(78) if n < 3 or n % 4 == 2]
GLM52 = {
    **GLM,
    "index_share_for_mtp_iteration": True,
    "index_skip_topk_offset": 3,
    "index_topk_freq": 4,
    "index_topk_pattern": None,
    "indexer_types": [
        "full" if layer in FULL_OF_52 else "shared" for layer in range(78)
    ],
    "max_position_embeddings": 1048576,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
}
FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
NVFP4 = {"quant_algo": "NVFP4", "quant_method": "modelopt", "ignore": ["lm_head"]}
APART = {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}
MINIMAX = dict(
    hidden_size=6144,
    intermediate_size=3072,
    num_hidden_layers=60,
    num_attention_heads=64,
    num_key_value_heads=4,
    head_dim=128,
    vocab_size=200064,
    max_position_embeddings=1048576,
    rms_norm_eps=1e-6,
    use_gemma_norm=True,
    attention_output_gate=False,
    rope_theta=5000000,
    rotary_dim=64,
    partial_rotary_factor=0.5,
    hidden_act="swigluoai",
    use_qk_norm=True,
    tie_word_embeddings=False,
    dense_intermediate_size=12288,
    shared_intermediate_size=3072,
    num_local_experts=128,
    num_experts_per_tok=4,
    n_shared_experts=1,
    scoring_func="sigmoid",
    use_routing_bias=True,
    moe_layer_freq=[0] * 3 + [1] * 57,
    qk_norm_type="per_head",
    swiglu_alpha=1.702,
    swiglu_limit=7.0,
    routed_scaling_factor=2.0,
    sparse_attention_config={
        "use_sparse_attention": True,
        "sparse_index_dim": 128,
        "sparse_num_index_heads": 4,
        "sparse_topk_blocks": 16,
        "sparse_block_size": 128,
        "sparse_disable_index_value": [0] * 3 + [1] * 57,
        "sparse_score_type": "max",
        "sparse_init_block": 0,
        "sparse_local_block": 1,
        "sparse_attention_freq": [0] * 3 + [1] * 57,
    },
)
DEEPSEEK_V4 = dict(
    model_type="deepseek_v4",
    index_head_dim=128,
    index_n_heads=64,
    index_topk=512,
    num_hidden_layers=43,
    sliding_window=128,
    quantization_config={**FP8, "scale_fmt": "ue8m0"},
)
GLM53 = dict(
    model_type="glm5_next",
    text_config=dict(model_type="glm5_next_text", index_kpool=4, index_topk=2048),
)


def indexers(config, layers=None, dtype="BF16"):
    """Headers of indexers as their makers store them."""
    heads, dim = config["index_n_heads"], config["index_head_dim"]
    shapes = {
        "wq_b": [heads * dim, config["q_lora_rank"]],
        "wk": [dim, config["hidden_size"]],
    }
    parts = {
        part: {"weight": (dtype, shape)}
        | ({"weight_scale_inv": ("F32", [1, 1])} if dtype.startswith("F8") else {})
        for part, shape in shapes.items()
    }
    parts["weights_proj"] = {"weight": ("BF16", [heads, config["hidden_size"]])}
    parts["k_norm"] = {"weight": ("F32", [dim]), "bias": ("F32", [dim])}
    every = range(config["num_hidden_layers"])
    return indexer_weights([*every] if layers is None else layers, parts)


ELSEWHERE = {"model.embed_tokens.weight": ("BF16", [8, 8])}
SINKS = ["sinks lost"]
SHARES = ["shared layers uninitialised", *SINKS]
# What mlx-lm 0.31 gets wrong besides: DeepSeek's rotation, and NVFP4.
FLIPPED = ["RoPE flipped"] * OLD
UNREAD = ["quantisation"] * OLD


@pytest.fixture
def published(tmp_path):
    """Writes what a published checkpoint is to a loader."""
    fp8 = "F8_E4M3"
    made = {
        "DeepSeek-V3.2 FP8": (
            {**DEEPSEEK, "quantization_config": {**FP8, "scale_fmt": "ue8m0"}},
            indexers(DEEPSEEK, dtype=fp8),
        ),
        "DeepSeek-V3.2 NVFP4": (DEEPSEEK, indexers(DEEPSEEK), APART),
        "GLM-5 BF16": (GLM, indexers(GLM)),
        "GLM-5 FP8": ({**GLM, "quantization_config": FP8}, indexers(GLM, dtype=fp8)),
        "GLM-5 NVFP4": (GLM, indexers(GLM), APART),
        "GLM-5.1 BF16": (GLM, indexers(GLM)),
        "GLM-5.1 FP8": ({**GLM, "quantization_config": FP8}, indexers(GLM, dtype=fp8)),
        "GLM-5.1 NVFP4": (
            {**GLM, "indexer_types": ["full"] * 78, "quantization_config": NVFP4},
            indexers(GLM),
        ),
        "GLM-5.2 BF16": (GLM52, indexers(GLM52, FULL_OF_52)),
        "GLM-5.2 FP8": (
            {**GLM52, "quantization_config": FP8},
            indexers(GLM52, FULL_OF_52, fp8),
        ),
        "GLM-5.2 NVFP4": (
            {**GLM52, "quantization_config": NVFP4},
            indexers(GLM52, FULL_OF_52),
        ),
        "MiniMax-M3": ({**MINIMAX, "model_type": "minimax_m3"}, ELSEWHERE),
        "MiniMax-M3 VL": (
            {"model_type": "minimax_m3_vl", "text_config": MINIMAX},
            ELSEWHERE,
        ),
        "DeepSeek-V4-Flash": (DEEPSEEK_V4, ELSEWHERE),
        "GLM-5.3-Flash": (GLM53, ELSEWHERE),
    }

    def write(name):
        config, weights, *apart = made[name]
        more = {"hf_quant_config": apart[0]} if apart else {}
        return write_headers(tmp_path / name, config, weights, **more)

    return write


@pytest.mark.parametrize(
    ("name", "stock", "on"),
    [
        ("DeepSeek-V3.2 FP8", [*FLIPPED, *SINKS], []),
        ("DeepSeek-V3.2 NVFP4", [*UNREAD, *FLIPPED, *SINKS], UNREAD),
        ("GLM-5 BF16", SINKS, []),
        ("GLM-5 FP8", SINKS, []),
        ("GLM-5 NVFP4", [*UNREAD, *SINKS], UNREAD),
        ("GLM-5.1 BF16", SINKS, []),
        ("GLM-5.1 FP8", SINKS, []),
        ("GLM-5.1 NVFP4", [*UNREAD, *SINKS], UNREAD),
        ("GLM-5.2 BF16", SHARES, []),
        ("GLM-5.2 FP8", SHARES, []),
        ("GLM-5.2 NVFP4", [*UNREAD, *SHARES], UNREAD),
    ],
)
def test_what_a_person_who_knows_the_model_would_say(
    doctor, published, name, stock, on
):
    folder = published(name)
    status, result = doctor(folder)
    assert (status, causes(result)) == (1, stock)
    status, result = doctor(folder, variable="1")
    assert (status, causes(result)) == (int(bool(on)), on)
    if not on:
        assert said(result)[0] == "healthy"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("MiniMax-M3", "builds no minimax_m3"),
        (
            "MiniMax-M3 VL",
            "builds no minimax_m3_vl"
            if OLD
            else "57 of its layers select keys by mlx_lm.models.minimax_m3_vl.Att",
        ),
        ("DeepSeek-V4-Flash", "not supported); it has index_topk"),
        ("GLM-5.3-Flash", "builds no glm5_next"),
    ],
)
def test_what_nobody_has_looked_at_is_not_healthy(doctor, published, name, sentence):
    folder = published(name)
    for variable in (None, "1"):
        status, result = doctor(folder, variable=variable)
        assert (status, said(result)) == (3, ["not examined"])
        assert sentence in result["verdicts"][0]["sentence"]
