"""A real model past its window, by the scripts that measure it."""

import json
import sys
from pathlib import Path

import pytest

import small_models
from processes import BENCH, bench

TEXT = BENCH / "smollm2" / "text.txt"
# One for each environment; the downloaded weights beside them are shared.
BUILD = BENCH.parent / "build" / f"test-plain-{Path(sys.prefix).name}"


@pytest.fixture(scope="module")
def smollm2():
    built = bench("smollm2/build.py", "--out", BUILD, "--kind", "llama")
    assert built.status == 0, built.stderr
    return BUILD


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return small_models.write_llama_folder(tmp_path_factory.mktemp("llama") / "llama")


def measured(script, *arguments):
    outcome = bench(script, *arguments, "--json")
    assert outcome.status == 0, outcome.stderr
    return json.loads(outcome.stdout)


@pytest.mark.newest
def test_the_sinks_of_a_window_are_worth_more_than_half(smollm2):
    """Stock loses them in steps of several tokens and in batches; ours doesn't."""
    options = ["--model", smollm2, "--text", TEXT, "--tokens", 128, "--window", 48]
    result = measured("rotating_window.py", *options, "--chunks", 48, "--batch", 2)
    for row in (*result["alone"], *result["batch"]):
        assert row["rotating"] == pytest.approx(row["sink cache"], rel=1e-3)
        assert row["rotating"] < 1.2 * row["full"]
        assert row["stock"] > 1.5 * row["rotating"]


@pytest.mark.newest
def test_positions(smollm2, tmp_path):
    pytest.importorskip("matplotlib")
    options = ["--model", smollm2, "--text", TEXT, "--tokens", 80, "--window", 32]
    result = measured("sink_positions.py", *options, "--block", 24, "--out", tmp_path)
    assert result == json.loads((tmp_path / "sink_positions.json").read_text())
    assert (tmp_path / "sink_positions.png").read_bytes().startswith(b"\x89PNG")
    assert result["prefill_equal"]
    gone, layers = 80 - 1 - 32, 30
    assert result["evictions"] == dict.fromkeys(result["evictions"], gone) | {
        "dense": 0
    }
    assert result["rotations"] == {
        "dense": 0,
        "absolute": 0,
        "local": gone * 4 * layers,
        "mismatched": gone * 28 * layers,
    }
    for block in result["blocks"]:
        assert block["absolute"] < 1.5 * block["dense"]
        assert block["local"] == pytest.approx(block["absolute"], rel=0.05)
        assert block["mismatched"] > block["absolute"]


def test_speed_is_measured_and_memory_constant(llama):
    options = ["--windows", 16, 24, "--rounds", 2, "--steps", 2, "--stream", 500]
    result = measured("cache_speed.py", "--model", llama, *options)
    arms = ["rotating", "absolute", "local", "full"]
    assert [row["arm"] for row in result["decode"]] == 2 * arms
    assert all(row["ratio"] == 1 for row in result["decode"] if row["arm"] == arms[0])
    for arm in arms[:3]:
        rows = [row for row in result["stream"]["rows"] if row["arm"] == arm]
        assert [row["tokens"] for row in rows] == [*range(50, 501, 50)]
        assert len({row["bytes"] for row in rows}) == 1
    assert result["drafts"] == []
    more = ["--draft-model", llama, "--new-tokens", 9, "--windows", 16]
    shown = bench("cache_speed.py", "--model", llama, *options, *more)
    assert "ratio" in shown.stdout and "500" in shown.stdout
    # The same model's drafts: each round of four accepts three.
    (*_, table) = shown.stdout.partition("Drafts of")
    assert table.count("75%") == 3


@pytest.mark.newest
@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            "rotating_window.py --tokens 20 --window 19",
            "20 tokens don't go past window",
        ),
        ("rotating_window.py --sinks 512", "sinks=512 must be smaller than window=512"),
        ("rotating_window.py --skip 9999999", "tokens after 9999999, not"),
        ("sink_positions.py --tokens 20 --window 20", "20 tokens don't go past window"),
        ("sink_positions.py --window 4", "sinks=4 must be smaller than window=4"),
        ("sink_positions.py --skip -1", "a whole number >= 0, not -1"),
        ("cache_speed.py --windows 4", "sinks=4 must be smaller than window=4"),
        ("cache_speed.py --windows 0", "a whole number >= 1"),
    ],
)
def test_what_cannot_be_gets_a_sentence(line, sentence, llama):
    script, *options = line.split()
    outcome = bench(script, "--model", llama, *options)
    assert outcome.status in (1, 2)
    assert sentence in outcome.stderr
    assert "Traceback" not in outcome.stderr
