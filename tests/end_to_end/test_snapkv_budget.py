"""``bench/snapkv_budget.py`` on a model small enough to do the same by hand."""

import json
import math
import sys

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

import mlx_sinks
import small_models
from mlx_sinks.upstream.loading import load_model
from processes import BENCH, bench, interrupted

SCRIPT = BENCH / "snapkv_budget.py"
PROMPT, PREDICTED, BUDGETS = 180, 20, (16, 40)
TEXT = "The lamp on the headland turns twice a minute; nobody has stopped it yet. " * 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_models.write_llama_folder(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def options(folder, text):
    sizes = ["--prompts", PROMPT, "--budgets", *BUDGETS, "--tokens", PREDICTED]
    return ["--model", folder, "--text", text, *sizes]


@pytest.fixture(scope="module")
def outcome(options, tmp_path_factory):
    pytest.importorskip("matplotlib")
    out = tmp_path_factory.mktemp("out")
    few = ["--stretches", 2, "--keys", 1, "--rounds", 1, "--steps", 2, "--out", out]
    done = bench(SCRIPT, *options, *few, LD_PRELOAD="")
    assert done.status == 0, done.stderr
    return done, json.loads((out / "snapkv_budget.json").read_text()), out


def perplexity(model, ids, caches):
    tokens = mx.array([ids])
    logits = model(tokens[:, :-1], cache=caches)
    return math.exp(nn.losses.cross_entropy(logits, tokens[:, 1:]).mean().item())


def test_the_perplexities_are_those_of_the_public_function(folder, outcome):
    _, result, _ = outcome
    model, tokenizer = load_model(str(folder))
    ids, (prompt,) = tokenizer.encode(TEXT), result["prompts"]
    rows = {(row["arm"], row["budget"]): row for row in prompt["perplexity"]}
    first, second = (
        ids[start : start + PROMPT + PREDICTED] for start in result["starts"]
    )
    for number, each in enumerate((first, second)):
        read, rest = each[: PROMPT - 1], each[PROMPT - 1 :]
        caches = make_prompt_cache(model)
        model(mx.array([read]), cache=caches)
        full = perplexity(model, rest, caches)
        for budget in BUDGETS:
            for arm, guarantee in (("guarantee", True), ("old cap", False)):
                method = mlx_sinks.SnapKV(budget, guarantee_sinks=guarantee)
                caches = mlx_sinks.compact_prompt_cache(model, read, method)
                ratio = rows[arm, budget]["each_times_full"][number]
                assert ratio * full == pytest.approx(
                    perplexity(model, rest, caches), rel=1e-4
                )


def test_sinks_bytes_and_passkeys(outcome):
    _, result, _ = outcome
    (prompt,) = result["prompts"]
    for row in prompt["perplexity"]:
        kept = row["sinks_kept"]
        if row["arm"] in ("guarantee", "full"):
            assert kept == 4
        elif row["arm"] == "old cap":
            assert kept >= min(4, row["budget"] // 8)
        else:
            assert kept == 0
    full, *held = prompt["held"]
    assert (full["budget"], full["times_full_bytes"]) == (None, 1)
    for row, budget in zip(held, BUDGETS, strict=True):
        assert row["times_full_bytes"] == pytest.approx(budget / (PROMPT - 1))
        assert row["tokens_per_second"] > 0
    for row in prompt["passkeys"]:
        assert len(row["depths"]) == 5
        assert all(0 <= share <= 1 for share in row["depths"])


def test_table_and_picture(outcome):
    done, _, out = outcome
    for words in ("times the full", "Passkeys said", "no sinks", "tokens/s"):
        assert words in done.stdout
    assert (out / "snapkv_budget.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.newest
@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ("--budgets 180", "a prompt of 180 tokens isn't compacted to 180 rows"),
        ("--skip 600", "tokens there, not 200"),
        ("--tokens 0", "--tokens: a whole number >= 1"),
        ("--model nowhere", "can't load nowhere"),
    ],
)
def test_bad_input_gets_a_sentence(options, more, sentence):
    done = bench(SCRIPT, *options, *more.split(), LD_PRELOAD="")
    assert done.status in (1, 2)
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.newest
def test_a_model_with_nothing_to_compact_gets_a_sentence(options, tmp_path):
    other = small_models.write_folder(tmp_path / "glm")
    done = bench(SCRIPT, *options, "--model", other, LD_PRELOAD="")
    assert done.status == 1
    assert "layer 0 can't be compacted: its cache is a CacheList" in done.stderr


@pytest.mark.newest
def test_an_interruption_leaves_nothing(options, tmp_path):
    out = tmp_path / "out"
    many = map(str, ["--stretches", 3, "--keys", 900, "--out", out])
    done = interrupted(
        *(sys.executable, SCRIPT, *options, *many), when=out.exists, LD_PRELOAD=""
    )
    assert done.status == 130
    assert "stopped" in done.stderr and "Traceback" not in done.stderr
    assert list(out.iterdir()) == []


def test_what_a_server_stores_for_the_next_turn(folder, text):
    options = ["--model", folder, "--text", text, "--budget", 32, "--prompts", 200]
    sizes = ["--answer", 40, "--question", 20, "--rounds", 2]
    done = bench("next_turn.py", *options, *sizes, "--json", LD_PRELOAD="")
    assert done.status == 0, done.stderr
    rows = {row["arm"]: row for row in json.loads(done.stdout)["rows"]}
    assert rows["nothing"]["bytes"] == 0 < rows["compacted"]["bytes"]
    assert rows["nothing"]["ratio"] == 1
    assert rows["whole prompt"]["bytes"] > 0
    assert all(row["seconds"] > 0 for row in rows.values())
