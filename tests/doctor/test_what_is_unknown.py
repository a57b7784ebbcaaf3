"""Formats, kinds and configurations that the doctor knows, or says it doesn't."""

import json
import shutil

import mlx.core as mx
import pytest

import small_models
from verdicts import causes, indexer_weights, said, write_headers

ON = "sinks=4,recency=6"
CONFIG = small_models.config("deepseek_v32")
HEADS, DIM = CONFIG["index_n_heads"], CONFIG["index_head_dim"]
PROJECTIONS = {
    "wq_b": (CONFIG["q_lora_rank"], HEADS * DIM),
    "wk": (CONFIG["hidden_size"], DIM),
    "weights_proj": (CONFIG["hidden_size"], HEADS),
}
NORM = {"k_norm": {"weight": ("F32", [DIM]), "bias": ("F32", [DIM])}}


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    return small_models.write_folder(tmp_path_factory.mktemp("glm"), "glm_moe_dsa")


def changed(folder, to, **facts):
    """A copy with other facts in its configuration; ``...`` takes one away."""
    copy = shutil.copytree(folder, to)
    config = {**json.loads((copy / "config.json").read_text()), **facts}
    kept = {key: value for key, value in config.items() if value is not ...}
    (copy / "config.json").write_text(json.dumps(kept))
    return copy


# ----------------------------------------------------------------- kinds and code


@pytest.mark.parametrize("kind", ["llama", "glm_moe_dsa"])
def test_a_folder_with_code_of_its_own_is_not_examined(doctor, tmp_path, kind):
    folder = write_headers(
        tmp_path,
        {**CONFIG, "model_type": kind, "model_file": "own.py"},
        {"model.layers.0.self_attn.indexer.wk.weight": ("F32", [8, 8])},
    )
    status, result = doctor(folder, variable="1")
    assert (status, said(result)) == (3, ["not examined"])
    (verdict,) = result["verdicts"]
    assert "own.py" in verdict["sentence"]
    assert verdict["fix"].startswith("mlx-sinks doctor --probe --trust-remote-code ")


@pytest.mark.parametrize("kind", ["foo_bar", "glm5next", "deepseek_v4", "minimax_m3"])
def test_a_kind_that_mlx_lm_cannot_build_is_not_examined(doctor, tmp_path, kind):
    weights = {"model.embed_tokens.weight": ("F32", [8, 8])}
    folder = write_headers(tmp_path, {"model_type": kind}, weights)
    status, result = doctor(folder)
    assert (status, said(result)) == (3, ["not examined"])
    assert f"builds no {kind}" in result["verdicts"][0]["sentence"]


def test_a_kind_with_a_selector_that_nobody_looked_at(doctor, tmp_path):
    ratios, sources = [0, 0, 4, 128], [2]
    config = {
        "model_type": "deepseek_v41",
        "num_hidden_layers": 4,
        "compress_ratios": ratios,
        "kv_source_layer_ids": sources,
        "index_source_layer_ids": sources,
    }
    weights = {"model.embed_tokens.weight": ("F32", [8, 8])}
    status, result = doctor(write_headers(tmp_path, config, weights))
    assert (status, said(result)) == (3, ["not examined"])
    sentence = result["verdicts"][0]["sentence"]
    known = "keys by mlx_lm.models.deepseek_v41.Indexer, for which mlx-sinks has no"
    assert known in sentence or "builds no deepseek_v41" in sentence


@pytest.mark.parametrize(
    ("facts", "weights"),
    [
        ({"index_topk": 64}, {}),
        ({"sparse_attention_config": {"use_sparse_attention": True}}, {}),
        ({}, {"model.layers.0.attn.lightning_indexer.wk.weight": ("F32", [8, 8])}),
    ],
    ids=["index_topk", "sparse attention", "weights"],
)
def test_a_known_kind_with_what_it_does_not_have(doctor, tmp_path, facts, weights):
    """A llama that brings a selection: mlx-lm's own llama overlooks it."""
    config = {**small_models.LLAMA, **facts}
    weights |= {"model.embed_tokens.weight": ("F32", [8, 8])}
    folder = write_headers(tmp_path, config, weights)
    status, result = doctor(folder, variable="1")
    assert (status, said(result)) == (3, ["not examined"])
    hint = next(iter(facts), "1 weights of indexers")
    assert hint in result["verdicts"][0]["sentence"]


def test_the_probe_looks_at_what_is_not_examined(doctor, tmp_path, glm):
    """Upstream's indexers in an architecture that the folder brings."""
    own = changed(glm, tmp_path / "own", model_file="own.py")
    (own / "own.py").write_text("from mlx_lm.models.glm_moe_dsa import *\n")
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, again and again. ")
    options = ("--probe", "--text", text, "--tokens", 40, "--trust-remote-code")
    status, result = doctor(own, *options, variable=ON)
    assert said(result)[0].startswith("indexers ")
    assert status == int(bool(causes(result)))
    status, result = doctor(own, "--probe", "--text", text, variable=ON)
    if status == 2:  # mlx-lm 0.31 runs a folder's code without being asked
        assert said(result) == ["not examined", "not probed"]


# ---------------------------------------------------------------------- formats


def packed(of):
    """Headers of all indexers, each projection stored as ``of`` says."""
    parts = {part: of(*sizes) for part, sizes in PROJECTIONS.items()}
    return indexer_weights([0, 1], {**parts, **NORM})


def awq(inputs, outputs):
    """4 bits packed along the outputs, as AutoAWQ has it."""
    groups = inputs // 32
    return {
        "qweight": ("I32", [inputs, outputs // 8]),
        "qzeros": ("I32", [groups, max(outputs // 8, 1)]),
        "scales": ("F16", [groups, outputs]),
    }


def gptq(inputs, outputs):
    arrays = {"g_idx": ("I32", [inputs]), "scales": ("F16", [inputs // 32, outputs])}
    return {"qweight": ("I32", [inputs // 8, outputs]), **arrays}


def compressed(inputs, outputs):
    return {
        "weight_packed": ("I32", [outputs, inputs // 8]),
        "weight_scale": ("BF16", [outputs, inputs // 32]),
        "weight_shape": ("I64", [2]),
    }


def nvfp4(inputs, outputs):
    return {
        "weight": ("U8", [outputs, inputs // 2]),
        "weight_scale": ("F8_E4M3", [outputs, inputs // 16]),
        "weight_scale_2": ("F32", []),
    }


def fp8(inputs, outputs):
    scale = {"weight_scale_inv": ("F32", [1, 1])}
    return {"weight": ("F8_E4M3", [outputs, inputs]), **scale}


@pytest.mark.parametrize(
    ("of", "method", "format"),
    [
        (awq, {"quant_method": "awq", "bits": 4}, "4-bit awq"),
        (gptq, {"quant_method": "gptq", "bits": 4}, "4-bit gptq"),
        (
            compressed,
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            "4-bit compressed-tensors",
        ),
        (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
        (fp8, {"quant_method": "fp8"}, "F8_E4M3"),
    ],
)
def test_indexers_in_other_formats_are_counted(doctor, tmp_path, of, method, format):
    config = {**CONFIG, "quantization_config": method}
    # weights_proj has 4 outputs: AWQ packs 8.
    weights = packed(of)
    status, result = doctor(write_headers(tmp_path, config, weights), variable=ON)
    counted = result["model"]["indexer_formats"]
    assert "indexer weights missing" not in said(result)
    assert result["model"]["layers_with_indexer_weights"] == 2
    assert counted[format] >= 4
    assert set(causes(result)) <= {"quantisation"}


def test_a_format_that_this_mlx_lm_cannot_load_has_its_reason(doctor, tmp_path):
    config = {**CONFIG, "quantization_config": {"quant_method": "hqq", "bits": 4}}
    folder = write_headers(tmp_path, config, packed(gptq))
    for variable in (None, ON):
        status, result = doctor(folder, variable=variable)
        assert (status, causes(result)[0]) == (1, "quantisation")
        assert "quantised by hqq, which this mlx-lm can't" in str(result["verdicts"])


@pytest.mark.parametrize("stated", [None, [1], {"quant_algo": ["x"]}])
def test_a_file_of_modelopts_that_says_nothing(doctor, tmp_path, stated):
    apart = {"hf_quant_config": {"quantization": stated}}
    folder = write_headers(tmp_path, CONFIG, packed(fp8), **apart)
    assert causes(doctor(folder, variable=ON)[1])[0] == "quantisation"


@pytest.mark.parametrize("kind", ["glm", "llama"])
def test_quantised_weights_that_no_configuration_names(doctor, tmp_path, kind):
    """As a config.json of the original beside weights of a conversion."""
    folder = tmp_path / "model"
    if kind == "glm":
        small_models.write_folder(folder, "glm_moe_dsa", bits=4)
    else:
        small_models.write_llama_folder(folder)
        weights = mx.load(str(folder / "model.safetensors"))
        name = "model.layers.0.self_attn.q_proj"
        keys = ("weight", "scales", "biases")
        packed = mx.quantize(weights[f"{name}.weight"], 32, 4)
        weights |= {f"{name}.{key}": each for key, each in zip(keys, packed)}
        mx.save_safetensors(str(folder / "model.safetensors"), weights)
    config = json.loads((folder / "config.json").read_text())
    for key in ("quantization", "quantization_config"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config))
    status, result = doctor(folder, variable=ON)
    assert (status, causes(result)) == (1, ["quantisation"])
    assert "nothing that config.json names" in result["verdicts"][0]["sentence"]


# ------------------------------------------------------------- numbers and rotation


@pytest.mark.parametrize(("freq", "shared"), [(4.0, 5), (4, 5), (1.0, 0)])
def test_counts_that_a_writer_made_floats(doctor, tmp_path, freq, shared):
    facts = dict(num_hidden_layers=8, index_topk_freq=freq, index_skip_topk_offset=2.0)
    config = {**small_models.config("glm_moe_dsa"), **facts}
    full = [0, 1, 5] if shared else [*range(8)]
    parts = {
        part: {"weight": ("F32", [outputs, inputs])}
        for part, (inputs, outputs) in PROJECTIONS.items()
    }
    weights = indexer_weights(full, {**parts, **NORM})
    status, result = doctor(write_headers(tmp_path, config, weights), variable=ON)
    assert (status, causes(result)) == (0, [])
    assert result["model"]["shared_layers"] == shared


def test_a_count_that_is_no_number_is_refused_as_before(doctor, tmp_path, glm):
    folder = changed(glm, tmp_path / "odd", index_topk_freq=4.5)
    status, result = doctor(folder, variable=ON)
    assert (status, causes(result)) == (1, ["schedule"])


@pytest.mark.parametrize(
    ("rope", "written"),
    [
        ({"rope_theta": 1000000, "rope_type": "default"}, '"rope_theta": 1000000'),
        (
            {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0},
            '"rope_scaling": {"rope_type": "yarn", "factor": 4.0}',
        ),
    ],
    ids=["theta", "scaling"],
)
def test_a_rotation_that_mlx_lm_drops(doctor, tmp_path, rope, written):
    """As transformers 5 writes it: mlx-lm's deepseek_v32 knows no rope_parameters."""
    folder = small_models.write_folder(tmp_path / "model", "deepseek_v32")
    folder = changed(folder, tmp_path / "new", rope_parameters=rope, rope_theta=...)
    status, result = doctor(folder, variable=ON)
    assert (status, causes(result)) == (1, ["RoPE dropped"])
    assert written in result["verdicts"][0]["fix"]
    same = {"rope_theta": 10000.0, "rope_type": "default"}
    folder = changed(folder, tmp_path / "same", rope_parameters=same)
    assert causes(doctor(folder, variable=ON)[1]) == []
