"""The scripts that time selections, at sizes that take no time: their figures hold."""

import json

import mlx.core as mx
import numpy as np
import pytest

import indexer_speed
import processes
from indexer_speed import Case, Inputs
from tools.rounds import in_turn, median, ratio

pytestmark = pytest.mark.newest

SMALL = ["--heads", 8, "--queries", 1, 3, "--keys", 64, 90, "--index-topk", 16]
SMALL += ["--batch", 1, 2, "--seconds", 0.01, "--draws", 2]


def bench(script, *arguments):
    # LD_PRELOAD, even empty: as it is, without starting again with another BLAS.
    return processes.bench(script, *arguments, LD_PRELOAD="")


def test_indexer_speed_and_its_resumption(tmp_path):
    first = bench("indexer_speed.py", *SMALL, "--out", tmp_path)
    assert first.status == 0, first.stderr
    assert "guarantee" in first.stdout
    result = json.loads((tmp_path / "indexer_speed.json").read_text())
    sizes = [[row[name] for name in "BHLT"] for row in result["rows"]]
    assert sizes == [[B, 8, L, T] for B in (1, 2) for L in (1, 3) for T in (64, 90)]
    for row in result["rows"]:
        assert row["upstream_recall"] == row["free_recall"] == 1
        for arm in ("upstream", "naive", "free", "ours"):
            assert row[f"{arm}_ms"] > 0 and row[f"{arm}_peak_bytes"] > 0
        assert ("whole_ratio" in row) == (row["B"] == 1)
    cases = [path for path in tmp_path.glob("*.json") if path.name[0] == "B"]
    assert len(cases) == len(result["rows"])

    cases[0].unlink()
    again = bench("indexer_speed.py", *SMALL, "--out", tmp_path, "--json")
    rows = json.loads(again.stdout)["rows"]
    same = [
        {**one, "floor_ms": 0} == {**other, "floor_ms": 0}
        for one, other in zip(rows, result["rows"])
    ]
    assert same.count(False) == 1


def test_what_upstream_could_not_hold_is_ours_alone():
    outcome = bench("indexer_speed.py", *SMALL, "--limit", 1e-9, "--json")
    for row in json.loads(outcome.stdout)["rows"]:
        assert "upstream_ms" not in row and row["ours_ms"] > 0
        assert row["upstream_needs_bytes"] == 8 * row["B"] * 8 * row["L"] * row["T"]


def test_no_case():
    outcome = bench("indexer_speed.py", "--keys", 9)
    assert outcome.status == 1
    assert "no --keys go past --index-topk 2048" in outcome.stderr


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recall_counts_the_true_best(dtype):
    inputs = Inputs.random(Case(2, 8, 3, 64, dtype), 0)
    b, i, first, last = 1, 1, 64 // 16, 62
    queries, keys, weights = (
        np.array(part.astype(mx.float32)).astype(np.float64)
        for part in (inputs.queries[b, :, i], inputs.keys[b, 0], inputs.weights[b, i])
    )
    scores = weights @ np.maximum(queries @ keys.T, 0)
    seen = np.arange(first, last + 1)
    best = seen[np.argsort(scores[seen])[-16:]]
    assert indexer_speed.recall(inputs, b, i, best) == 1
    best[:4] = [0, 1, 63, seen[np.argmin(scores[seen])]]  # hidden ones, and the worst
    assert indexer_speed.recall(inputs, b, i, best) == 12 / 16


def test_rounds_are_warmed_up_in_orders_of_their_own_and_compared_one_by_one():
    calls, steps = [], []

    def arm(name):
        return lambda: calls.append(name) or len(calls) * (2 if name == "b" else 1)

    rounds = in_turn({name: arm(name) for name in "ab"}, 9, lambda: steps.append(1))
    assert len(rounds) == 9 and len(steps) == len(calls) == 20
    orders = [tuple(calls[n : n + 2]) for n in range(0, 20, 2)]
    assert {*orders} == {("a", "b"), ("b", "a")}
    ratios = sorted(each["b"] / each["a"] for each in rounds)
    assert ratio(rounds, "b", "a") == ratios[4]
    assert median(rounds, "a") == sorted(each["a"] for each in rounds)[4]


def test_topk_speed():
    sizes = ["--columns", 64, "--rows", 2, "--index-topk", 16, "--draws", 2]
    outcome = bench("topk_speed.py", *sizes, "--json")
    assert outcome.status == 0, outcome.stderr
    (row,) = json.loads(outcome.stdout)["results"]
    assert all(row["ms"][way] > 0 for way in ("argpartition", "argsort", "counting"))
    assert "have to go past" in bench("topk_speed.py", "--columns", 9).stderr


def test_arithmetic():
    outcome = bench("arithmetic.py", "--json", "--keys", 2**17)
    deepseek = json.loads(outcome.stdout)["rows"][0]
    assert deepseek["prefill_bytes"] == 64 * 2048 * 2**17 * 2  # 32 GiB, bfloat16
    assert deepseek["key_bytes"] == 61 * 2**17 * 128 * 2
    assert deepseek["operations"] == 2 * 61 * 64 * 2**17 * 128


def test_attention_speed(tmp_path):
    pytest.importorskip("matplotlib")
    sizes = ["--heads", 2, "--queries", 4, 30, "--keys", 60, 200, "--index-topk", 16]
    few = ["--rounds", 1, "--out", tmp_path]
    for more in ([], ["--whole"], ["--dtype", "bfloat16"]):
        done = bench("attention_speed.py", *sizes, *few, *more)
        assert done.status == 0, done.stderr
        result = json.loads((tmp_path / "attention_speed.json").read_text())
        assert (tmp_path / "attention_speed.png").stat().st_size > 0
        rows = result["rows"]
        arms = ["upstream", "absorbed", "gathered", "chosen"]
        assert [row["arm"] for row in rows] == 4 * arms
        assert all(row["times"] == 1 for row in rows if row["arm"] == "upstream")
        assert all(row["ms"] > 0 and row["mib"] >= 0 for row in rows)
    said = f'MLX_SINKS="sparse_from={result["sparse_from"]}"'
    assert (said in done.stdout) == (result["sparse_from"] is not None)
