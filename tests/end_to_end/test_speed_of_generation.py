"""The script that times generations, on a small model: its figures add up."""

import argparse
import json
import math
import sys
import time

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.deepseek_v32 import DeepseekV32MLP

import end_to_end
import mlx_sinks
import processes
import small_models
from processes import BENCH, interrupted
from tools.arms import indexers

SCRIPT = "end_to_end.py"
ARMS = ["stock", "sinks", "nothing forced"]
DENSE, SPARSE, TOKENS = 8, 32, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_models.write_folder(tmp_path_factory.mktemp("speed") / "glm")


def bench(*arguments, **variables):
    # LD_PRELOAD, even empty: as it is, without starting again with another BLAS.
    return processes.bench(SCRIPT, *arguments, **{"LD_PRELOAD": "", **variables})


def small_run(folder, *options, **variables):
    fixed = ["--model", folder, "--prompts", DENSE, SPARSE, "--tokens", TOKENS]
    outcome = bench(*fixed, "--prefill-step", 16, *options, **variables)
    assert outcome.status == 0, outcome.stderr
    return outcome


def same_tokens(result):
    rows = result["rows"]
    return {(row["prompt"], row["arm"]): row["same_tokens"] for row in rows}


def check_tokens(same):
    """Nothing changes while all tokens fit; past that, stock isn't what sinks are."""
    assert all(same[DENSE, arm] for arm in ARMS)
    assert not same[SPARSE, "sinks"]


def test_figures_add_up(folder, tmp_path):
    start = time.perf_counter()
    shown = small_run(folder, "--rounds", 1, "--out", tmp_path)
    elapsed = time.perf_counter() - start
    for word in ("prefill", "decode", "peak MiB", *ARMS):
        assert word in shown.stdout
    result = json.loads((tmp_path / "end_to_end.json").read_text())
    assert result["index_topk"] == small_models.INDEX_TOPK
    check_tokens(same_tokens(result))
    rows = result["rows"]
    arms = [(length, arm) for length in (DENSE, SPARSE) for arm in ARMS]
    assert [(row["prompt"], row["arm"]) for row in rows] == arms

    seconds = 0
    for place, row in enumerate(rows):
        stock = rows[place - place % len(ARMS)]
        for phase, tokens in (("prefill", row["prompt"]), ("decode", TOKENS)):
            name = f"{phase}_tokens_per_second"
            assert 0 < row[name] < math.inf
            assert row[f"{phase}_ratio"] == pytest.approx(row[name] / stock[name])
            seconds += tokens / row[name]
        assert row["peak_bytes"] > result["weights_bytes"] > 0
    assert seconds < elapsed


def test_stock_is_stock_whatever_the_variable_says(folder):
    shown = small_run(folder, "--rounds", 2, "--json", MLX_SINKS="1")
    check_tokens(same_tokens(json.loads(shown.stdout)))


def test_random_layers_too_at_the_default_lengths(monkeypatch):
    """In this process, with smaller sizes than GLM's, under a plugin that is on."""
    small = small_models.config("glm_moe_dsa")
    sizes = {name: small[name] for name in end_to_end.GLM if name in small}
    monkeypatch.setattr(end_to_end, "GLM", {**end_to_end.GLM, **sizes})
    mlx_sinks.install()
    options = dict(glm_layers=2, dtype=None, prompts=None, tokens=TOKENS)
    options.update(rounds=1, prefill_step=16, seed=0, turn=5)
    result = end_to_end.measure(argparse.Namespace(**options))
    check_tokens(same_tokens(result))
    assert {row["prompt"] for row in result["rows"]} == {DENSE, SPARSE, 2 * SPARSE}


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_random_layers_have_the_shape_of_glm(dtype):
    """Looked at without evaluating anything: a layer has 400 million weights."""
    model = end_to_end.glm(2, dtype, seed=0)
    assert [type(layer.mlp) for layer in model.layers] == [DeepseekV32MLP] * 2
    assert {weight.dtype for _, weight in tree_flatten(model.parameters())} == {dtype}
    indexer = indexers(model)[1]
    assert (indexer.index_topk, indexer.rope.traditional) == (2048, True)
    assert indexer.wq_b.weight.shape == (32 * 128, 2048)
    assert model.layers[1].self_attn.o_proj.weight.shape == (6144, 64 * 256)


@pytest.mark.newest
@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("", "one of the arguments --model --glm-layers is required"),
        ("--model {glm} --glm-layers 1", "not allowed with argument --model"),
        ("--model {llama}", "is a llama model without an indexer"),
        ("--model {glm} --prompts 0", "--prompts: a whole number >= 1"),
        ("--model {glm} --dtype bfloat16", "--dtype is for --glm-layers"),
    ],
)
def test_bad_input_gets_a_sentence(line, sentence, folder, tmp_path):
    llama = small_models.write_llama_folder(tmp_path / "llama")
    outcome = bench(*line.format(glm=folder, llama=llama).split())
    assert outcome.status in (1, 2)
    assert sentence in outcome.stderr
    assert "Traceback" not in outcome.stderr


@pytest.mark.newest
def test_an_interrupted_run_ends_without_a_result(folder, tmp_path):
    out = tmp_path / "new"

    def begun():
        # The options are read when the folder appears; the work comes right after.
        return out.exists() and time.sleep(0.5) is None

    outcome = interrupted(
        *(sys.executable, BENCH / SCRIPT, "--model", folder),
        *("--tokens", "1000000", "--out", out),
        when=begun,
        LD_PRELOAD="",
    )
    assert outcome.status == 130
    assert "end_to_end.py: stopped" in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert not [*out.iterdir()]
