"""The scripts that measure any model, on one small enough to check by hand."""

import gzip
import hashlib
import json
import math
import shutil
import sys

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import mlx_sinks
import processes
import small_models
from mlx_sinks.upstream.loading import load_model
from processes import BENCH, command, interrupted, run

TEXT = "The lamp on the headland turns twice a minute; nobody has stopped it yet. " * 2
TOKENS = 100
ARMS = ("stock", "sinks", "dense")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_models.write_folder(tmp_path_factory.mktemp("bench") / "glm")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "text.txt"
    path.write_text(TEXT)
    return path


def bench(script, *arguments, **variables):
    # LD_PRELOAD, even empty: as it is, without starting again with another BLAS.
    return processes.bench(script, *arguments, **{"LD_PRELOAD": "", **variables})


def losses_at_once(model, ids):
    """Of each token after the first, from one call and without a cache."""
    logits = model(mx.array(ids[:-1])[None])[0]
    return np.array(nn.losses.cross_entropy(logits, mx.array(ids[1:])))


def test_perplexity(folder, text, tmp_path):
    options = ["--tokens", TOKENS, "--block", 30, "--chunk", 7, "--worst", 3]
    options += ["--out", tmp_path]
    outcome = bench("perplexity.py", "--model", folder, "--text", text, *options)
    assert outcome.status == 0, outcome.stderr
    assert "won by" in outcome.stdout
    result = json.loads((tmp_path / "perplexity.json").read_text())

    model, tokenizer = load_model(str(folder))
    ids = tokenizer.encode(TEXT)[:TOKENS]
    losses = {"stock": losses_at_once(model, ids)}
    with mlx_sinks.patched():
        losses["sinks"] = losses_at_once(model, ids)
    for layer in model.layers:
        layer.self_attn.indexer.index_topk = TOKENS
    losses["dense"] = losses_at_once(model, ids)

    past = small_models.INDEX_TOPK
    for arm, each in losses.items():
        expected = [each[start : start + 30].mean() for start in range(0, 99, 30)]
        got = [math.log(block[arm]) for block in result["blocks"]]
        assert got == pytest.approx(expected, abs=1e-4)
        assert math.log(result["perplexity"][arm]) == pytest.approx(
            each[past:].mean(), abs=1e-4
        )
    assert result["perplexity"]["stock"] != result["perplexity"]["dense"]
    wins = [block["won_by"] for block in result["blocks"]]
    assert [wins.count(arm) for arm in ("stock", "sinks")] == [*result["wins"].values()]
    for block in result["blocks"]:
        assert block["won_by"] == min(("sinks", "stock"), key=block.get)
    lost = losses["stock"] - losses["dense"]
    named = [token["position"] for token in result["worst"]]
    assert named == [*(np.argsort(-lost)[:3] + 1)]
    assert result["worst"][0]["token"] == TEXT[named[0]]
    assert result["worst"][0]["share_of_loss"] == pytest.approx(
        lost.max() / lost.sum(), rel=1e-2
    )
    written = " ".join(map(str, ids))
    assert result["sha256"] == hashlib.sha256(written.encode()).hexdigest()
    assert (result["tokens"], result["predicted"]) == (TOKENS, TOKENS - 1 - past)


def test_stock_is_stock_whatever_the_variable_says(folder, text):
    options = ["--model", folder, "--text", text, "--tokens", 60, "--json"]
    plain, under = (
        json.loads(bench("perplexity.py", *options, **variables).stdout)
        for variables in ({}, {"MLX_SINKS": "1"})
    )
    assert plain == under


def test_no_arm_wins_where_both_are_the_same(folder, text):
    options = ["--tokens", 60, "--sinks", 0, "--recency", 0, "--json"]
    done = bench("perplexity.py", "--model", folder, "--text", text, *options)
    result = json.loads(done.stdout)
    assert result["wins"] == {"stock": 0, "sinks": 0}
    assert result["perplexity"]["stock"] == result["perplexity"]["sinks"]


def profile(folder, out, *options, **variables):
    fixed = ["--model", folder, "--past", 4, "--block", 10, "--seeds", 3, "--out", out]
    fixed += ["--prompt", "Why?"]
    return bench("repetition_profile.py", *fixed, *options, **variables)


def test_repetition_profile_and_its_resumption(folder, tmp_path):
    pytest.importorskip("matplotlib")
    outcome = profile(folder, tmp_path)
    assert outcome.status == 0, outcome.stderr
    for heading in ("repeats 4", "distinct", "longest run", "surprise", " past"):
        assert heading in outcome.stdout
    result = json.loads((tmp_path / "repetition_profile.json").read_text())
    assert result["total_tokens"] == 4 * small_models.INDEX_TOPK
    parts = sorted(tmp_path.glob("*-*.json"))
    assert len(parts) == 6
    for way in ("greedy", "sampled"):
        blocks = [result["profiles"][way]["arms"][arm]["blocks"] for arm in ARMS]
        assert blocks[0] != blocks[1]
        for block in (block for arm in blocks for block in arm):
            assert 0 <= block["repeats_8"] <= block["repeats_4"] <= 1
            assert ("repeats_4_error" in block) == (way == "sampled")
            # To itself a model's text is no surprise; to a uniform guess it is 260.
            assert 1 <= block["surprise"] < 260**2
    assert (tmp_path / "repetition_profile.png").read_bytes().startswith(b"\x89PNG")

    before = {path: path.stat().st_mtime_ns for path in parts}
    parts[0].unlink()
    again = profile(folder, tmp_path)
    assert again.stdout == outcome.stdout
    after = {path: path.stat().st_mtime_ns for path in parts}
    assert [path for path in parts if before[path] != after[path]] == parts[:1]

    assert profile(folder, tmp_path, "--sinks", 2).status == 0
    kept = json.loads((tmp_path / "greedy-sinks.json").read_text())
    assert kept["facts"]["policy"] == "2 sinks + 8 recent"


@pytest.mark.newest
def test_an_interrupted_profile_says_how_to_go_on(folder, tmp_path):
    """Ctrl-C after the first finished part: it stays, and nothing half-done does."""
    outcome = interrupted(
        *(sys.executable, BENCH / "repetition_profile.py", "--model", folder),
        *("--tokens", "600", "--seeds", "1", "--out", tmp_path),
        when=lambda: any(tmp_path.glob("*-*.json")),
        LD_PRELOAD="",
    )
    assert outcome.status == 130
    assert "stopped; the same command goes on" in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert not [path for path in tmp_path.iterdir() if "unfinished" in path.name]


@pytest.fixture(scope="module")
def without_indexer(tmp_path_factory):
    return small_models.write_llama_folder(tmp_path_factory.mktemp("llama") / "llama")


@pytest.mark.newest
@pytest.mark.parametrize(
    "argv",
    [
        (sys.executable, BENCH / "perplexity.py"),
        (sys.executable, BENCH / "repetition_profile.py"),
        (command("mlx-sinks"), "probe"),
    ],
    ids=["perplexity", "repetition_profile", "probe"],
)
def test_a_model_that_cant_be_measured_gets_a_sentence(argv, without_indexer):
    for model, words in [
        (without_indexer, ("indexer", "patches (known: dsa")),
        ("nowhere", ("can't load nowhere",)),
    ]:
        outcome = run(*argv, "--model", model, LD_PRELOAD="")
        assert outcome.status == 1
        assert any(word in outcome.stderr for word in words)
        assert "Traceback" not in outcome.stderr


@pytest.mark.newest
@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("perplexity.py --tokens 10", "10 tokens don't go past index_topk 16"),
        ("perplexity.py --tokens 9999999", "tokens, not 9999999"),
        ("perplexity.py --sinks 16", "must be smaller than the model's index_topk=16"),
        ("perplexity.py --sinks -1", "sinks must be a whole number"),
        ("perplexity.py --text gone.txt", "gone.txt"),
        ("repetition_profile.py --tokens 10", "10 tokens don't go past index_topk"),
        ("repetition_profile.py --seeds 0", "--seeds: a whole number >= 1"),
    ],
)
def test_bad_input_gets_a_sentence(line, sentence, folder, text):
    script, *options = line.split()
    outcome = bench(script, "--model", folder, *options)
    assert outcome.status in (1, 2)
    assert sentence in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_probe_command(folder, text, tmp_path):
    pytest.importorskip("matplotlib")
    argv = (command("mlx-sinks"), "probe", "--model", folder, "--text", text)
    options = ("--tokens", "80", "--block", "32", "--recency", "8", "--out", tmp_path)
    shown = run(*argv, *options)
    assert shown.status == 0, shown.stderr
    assert "skill" in shown.stdout and "mean" in shown.stdout
    printed = run(*argv, *options, "--json", "--chunk", "9")
    result = json.loads(printed.stdout)
    assert result == json.loads((tmp_path / "probe.json").read_text())
    assert (tmp_path / "probe.png").read_bytes().startswith(b"\x89PNG")
    assert result["layers"] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert result["blocks"] == [0, 32, 64]
    assert result["policy"] == "4 sinks + 8 recent"
    figures = result["by_layer_and_block"]
    for names in zip(*(figures[name] for name in ("mass", "mass_best"))):
        for mass, best in zip(*names):
            assert 0 < mass <= best + 1e-5 <= 1 + 2e-5


@pytest.mark.newest
def test_a_probe_of_a_folder_with_code_of_its_own(folder, text, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "model")
    own = "from mlx_lm.models.deepseek_v32 import Model, ModelArgs\n"
    (copy / "own.py").write_text(own)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_file": "own.py"}))
    argv = (command("mlx-sinks"), "probe", "--model", copy, "--text", text)
    refused = run(*argv, "--tokens", "80")
    assert refused.status == 1
    assert "on the command line: --trust-remote-code" in refused.stderr
    probed = run(*argv, "--tokens", "80", "--trust-remote-code")
    assert probed.status == 0, probed.stderr


@pytest.mark.newest
def test_a_changed_configuration_makes_the_parts_anew(folder, tmp_path):
    """Not only other weights make another model."""
    copy = shutil.copytree(folder, tmp_path / "model")
    assert profile(copy, tmp_path / "out").status == 0
    config = json.loads((copy / "config.json").read_text())
    config["rope_theta"] = 50.0
    (copy / "config.json").write_text(json.dumps(config))
    before = json.loads((tmp_path / "out" / "greedy-dense.json").read_text())
    assert profile(copy, tmp_path / "out").status == 0
    after = json.loads((tmp_path / "out" / "greedy-dense.json").read_text())
    assert before["result"] != after["result"]


@pytest.fixture(scope="module")
def broken(folder, tmp_path_factory):
    """A model whose attention is NaN in its second layer."""
    copy = shutil.copytree(folder, tmp_path_factory.mktemp("nan") / "model")
    weights = dict(mx.load(str(folder / "model.safetensors")))
    name = "model.layers.1.self_attn.q_b_proj.weight"
    weights[name] = mx.full(weights[name].shape, mx.nan)
    mx.save_safetensors(str(copy / "model.safetensors"), weights, {"format": "mlx"})
    return copy


def test_what_is_no_number_wins_nothing_and_is_named(broken, text):
    options = ["--model", broken, "--text", text, "--tokens", 60, "--json"]
    result = json.loads(bench("perplexity.py", *options).stdout, parse_constant=None)
    assert result["wins"] == {"stock": 0, "sinks": 0}
    assert result["perplexity"]["dense"] is None
    probed = json.loads(run(command("mlx-sinks"), "probe", *options).stdout)
    assert probed["suspects"][0] == "model.layers.1.self_attn"
    assert probed["skill"][1] is None


def test_a_probe_that_saw_nothing_calls_nothing_healthy(folder, text, tmp_path):
    argv = [command("mlx-sinks"), "probe", "--model", folder, "--text", text]
    outcome = run(*argv, "--tokens", "30", "--out", tmp_path / "new")
    assert (outcome.status, outcome.stdout) == (1, "")
    assert "no query was looked at between index_topk 16 and token 30" in outcome.stderr
    assert [*(tmp_path / "new").iterdir()] == []


@pytest.mark.newest
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--tokens 16", "16 tokens don't go past the model's index_topk 16"),
        ("--tokens 9999", "the text has 148 tokens, not 9999"),
        ("--queries 9 --block 8", "--queries 9 exceeds --block 8"),
        ("--tokens 0", "--tokens: a whole number >= 1"),
        ("--sinks x", "sinks must be a whole number"),
        ("--sinks 16", "must be smaller than the model's index_topk=16"),
        ("--out {text}", "--out"),
        ("--text {damaged}", "is no text"),
        ("--text gone.txt", "gone.txt"),
        ("--model [/bold]", "can't load [/bold]"),
    ],
)
def test_a_probe_that_cannot_be_gets_a_sentence(
    options, sentence, folder, text, tmp_path
):
    damaged = tmp_path / "text.gz"
    damaged.write_bytes(gzip.compress(TEXT.encode())[:40])
    options = options.format(text=text, damaged=damaged).split()
    argv = [command("mlx-sinks"), "probe", "--model", folder, "--text", text]
    outcome = run(*argv, *options)
    assert outcome.status in (1, 2)
    assert sentence in outcome.stderr
    assert "Traceback" not in outcome.stderr
