"""SmolLM2 as DeepSeek and GLM under everything that mlx-lm does with a model.

Its real weights run in upstream's own architecture: the folder loads without any flag.
"""

import json
import shutil
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx_lm.models.cache import (
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

import mlx_sinks
import several_machines
from batches import alone_tokens, batch_tokens
from launches import said, spread
from processes import BENCH, bench, command, generation, run, serving_model
from tools.arms import load_any

TEXT = BENCH / "smollm2" / "text.txt"
BUILD = BENCH.parent / "build" / f"test-real-{Path(sys.prefix).name}"
KINDS = ("llama", "deepseek_v32", "glm_moe_dsa")
POLICY = mlx_sinks.SinkPolicy(sinks=4, recency=6)
VALUE = "sinks=4,recency=6"
NEW_TOKENS = 6


def of_each_kind(kind):
    """What build.py is asked for; past 16 tokens the indexers, random ones, select."""
    share = ["--share", 4] if kind == "glm_moe_dsa" else []
    return [] if kind == "llama" else ["--index-topk", 16, *share]


@pytest.fixture(scope="module")
def folders():
    """One folder for each kind, built into the same place again and again."""
    for kind in KINDS:
        words = "--kind", kind, *of_each_kind(kind)
        built = bench("smollm2/build.py", "--out", BUILD / kind, *words)
        assert built.status == 0, built.stderr
    yield {kind: BUILD / kind for kind in KINDS}
    shutil.rmtree(BUILD)  # some gigabytes


@pytest.fixture(scope="module")
def prompts():
    """Two parts of a text, both past index_topk and of unequal length."""
    tokenizer = mlx_lm.tokenizer_utils.load(BUILD / "deepseek_v32")
    ids = tokenizer.encode(TEXT.read_text())
    return [ids[start : start + length] for start, length in ((0, 31), (300, 24))]


@pytest.fixture(scope="module")
def model(folders):
    return mlx_lm.load(str(folders["deepseek_v32"]))[0]


@pytest.fixture(scope="module")
def alone(model, prompts):
    """What each prompt is answered by itself, and that upstream answers otherwise."""
    with mlx_sinks.patched(POLICY):
        tokens = [alone_tokens(model, ids, None, NEW_TOKENS) for ids in prompts]
    assert tokens != [alone_tokens(model, ids, None, NEW_TOKENS) for ids in prompts]
    return tokens


@pytest.mark.parametrize("kind", KINDS[1:])
def test_logits_are_the_llamas(folders, kind):
    reading = ["--text", TEXT, "--tokens", 48, "--steps", 48, 16, 1, "--json"]
    models = ["--model", folders[kind], "--reference", folders["llama"]]
    compared = bench("exactness.py", *models, *reading)
    assert compared.status == 0, compared.stderr
    rows = json.loads(compared.stdout)["rows"]
    assert [row["step"] for row in rows] == [48, 16, 1]
    for row in rows:
        assert row["difference"] < 1e-4
        assert row["same_token"] == 1
        assert row["perplexity"] == pytest.approx(row["reference"], rel=1e-4)


@pytest.mark.newest
@pytest.mark.parametrize("kind", KINDS[1:])
def test_sparse_attention_is_upstreams_over_thirty_layers(folders, kind):
    """The policy forces all columns: no near tie decides which are selected."""
    model, tokenizer = load_any(str(folders[kind]))
    ids = mx.array(tokenizer.encode(TEXT.read_text())[:64])[None]
    forced = mlx_sinks.SinkPolicy(sinks=4, recency=12, sparse_from=1)
    found, perplexities = [], []
    for names in (["dsa"], ["dsa", "sparse_attention"]):
        with mlx_sinks.patched(forced, names):
            cache = make_prompt_cache(model)
            parts = [model(part, cache=cache) for part in mx.split(ids, [40], axis=1)]
        logits = mx.concatenate(parts, axis=1)[:, 16:-1]
        loss = nn.losses.cross_entropy(logits, ids[:, 17:]).mean()
        found.append(logits)
        perplexities.append(mx.exp(loss).item())
    stock, ours = found
    assert mx.abs(ours - stock).max() < 1e-4 * mx.abs(stock).max()
    assert not mx.array_equal(ours, stock)
    assert perplexities[1] == pytest.approx(perplexities[0], rel=1e-4)


def test_a_model_that_differs_is_told_apart(folders):
    """Else the test above could not fail."""
    models = ["--model", folders["llama"], "--reference", folders["deepseek_v32"]]
    steps = ["--text", TEXT, "--tokens", 8, "--steps", 8, "--json"]
    path = folders["llama"] / "config.json"
    config = path.read_text()
    path.write_text(json.dumps({**json.loads(config), "rope_theta": 10000.0}))
    try:
        compared = bench("exactness.py", *models, *steps)
    finally:
        path.write_text(config)
    (row,) = json.loads(compared.stdout)["rows"]
    assert row["difference"] > 1e-3


def test_a_saved_and_trimmed_prompt_cache_goes_on_the_same(
    model, prompts, alone, tmp_path
):
    cache, file = make_prompt_cache(model), str(tmp_path / "cache.safetensors")
    with mlx_sinks.patched(POLICY):
        alone_tokens(model, prompts[0], cache, 4)
        trim_prompt_cache(cache, cache[0][0].offset - len(prompts[0]) + 1)
        try:
            save_prompt_cache(file, cache)
        except ValueError as error:
            assert "empty array" in str(error)
            pytest.skip("mlx before 0.32 can't save stock's empty values either")
        loaded = load_prompt_cache(file)
        assert alone_tokens(model, prompts[0][-1:], loaded, NEW_TOKENS) == alone[0]


def test_a_ragged_batch_is_answered_as_each_prompt_alone(model, prompts, alone):
    with mlx_sinks.patched(POLICY):
        assert batch_tokens(model, prompts, None, NEW_TOKENS)[0] == alone


def test_speculation_with_the_plain_llama_as_the_draft(folders, prompts, alone):
    """Its tokens are those of the model without a draft."""
    tokenizer = mlx_lm.tokenizer_utils.load(folders["deepseek_v32"])
    text = tokenizer.decode(prompts[0])
    words = generation(folders["deepseek_v32"], text, NEW_TOKENS)
    drafted = run(
        *(command("mlx_lm.generate"), *words, "--draft-model", folders["llama"]),
        MLX_SINKS=VALUE,
    )
    assert drafted.status == 0, drafted.stderr
    assert tokenizer.decode(alone[0]).strip() in drafted.stdout


def test_the_server_answers_as_the_model_alone(folders, prompts, alone, tmp_path):
    tokenizer = mlx_lm.tokenizer_utils.load(folders["deepseek_v32"])
    with serving_model(tmp_path, folders["deepseek_v32"], MLX_SINKS=VALUE) as server:
        status, answer = server.complete(
            prompt=tokenizer.decode(prompts[0]), max_tokens=NEW_TOKENS, temperature=0
        )
    assert status == 200, answer
    assert answer["choices"][0]["text"].strip() == tokenizer.decode(alone[0]).strip()


@pytest.mark.newest
@pytest.mark.parametrize(
    ("kind", "parallelism", "processes"),
    [
        ("glm_moe_dsa", "pipeline", 2),  # layers that share stand on both sides
        ("deepseek_v32", "tensor", 3),  # it has nine heads
    ],
)
def test_several_processes_generate_the_tokens_of_one(
    folders, prompts, kind, parallelism, processes, tmp_path
):
    few = NEW_TOKENS // 2
    with mlx_sinks.patched(POLICY):
        model, _ = mlx_lm.load(str(folders[kind]))
        expected = several_machines.tokens(model, prompts, few)
    answers = spread(
        folders[kind], parallelism, prompts, few, VALUE, tmp_path, processes
    )
    assert answers == [expected] * processes, said(tmp_path)


def test_the_shared_layers_of_real_weights(folders, prompts):
    """Stock mlx-lm doesn't load them; with the guarantee they write as the dense do."""
    with pytest.raises(ValueError, match="Missing"):
        mlx_lm.load(str(folders["glm_moe_dsa"]))
    model, _ = load_any(str(folders["glm_moe_dsa"]))
    shared = [not hasattr(layer.self_attn.indexer, "wk") for layer in model.layers]
    assert shared == [bool(number % 4) for number in range(30)]
