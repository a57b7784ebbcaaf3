"""A real model whose random indexers lose its sinks, from the package index's weights.

The commands are those of the README; top-k 128 of 512 tokens has the ratio of 256 of
1,024 at a cost that a CPU without an optimised BLAS can bear.
"""

import json
import sys
from pathlib import Path

import pytest

from processes import BENCH, bench

TEXT = BENCH / "smollm2" / "text.txt"
BUILDER = "smollm2/build.py"
# One for each environment; the downloaded weights beside them are shared.
BUILD = BENCH.parent / "build" / f"test-llama-{Path(sys.prefix).name}"


@pytest.fixture(scope="module")
def folder():
    built = bench(BUILDER, "--out", BUILD, "--kind", "llama")
    assert built.status == 0, built.stderr
    return BUILD


@pytest.fixture(scope="module")
def figures(request, folder, tmp_path_factory):
    """The zoo's rows: random indexers of the seeds asked for, and what was trained."""
    kinds = request.config.getoption("--zoo")
    seeds = request.config.getoption("--smollm2-seeds")
    facts = [
        "--model",
        folder,
        "--index-topk",
        128,
        "--tokens",
        512,
        "--generate",
        0,
        "--json",
    ]
    facts += ["--seeds", *seeds, "--parts", tmp_path_factory.mktemp("zoo")]
    facts += ["--text", TEXT]
    # With the variable set, too, stock has to be stock.
    measured = bench("failure_zoo.py", *facts, "--indexers", *kinds, MLX_SINKS="1")
    assert measured.status == 0, measured.stderr
    return json.loads(measured.stdout)["rows"]


def rows(figures, indexers, arm):
    found = [r for r in figures if (r["indexers"], r["arm"]) == (indexers, arm)]
    if not found:
        pytest.skip(f"not asked for: {indexers}")
    return found


def test_random_indexers_lose_sinks_and_the_guarantee_keeps_them(figures):
    assert all(row["sinks_kept"] < 0.6 for row in rows(figures, "random", "stock"))
    assert all(row["skill"] < 0.3 for row in rows(figures, "random", "stock"))


def test_perplexity_is_near_dense_with_the_guarantee_and_far_without(figures):
    (dense,) = rows(figures, "none", "dense")
    assert 30 < dense["perplexity"] < 60
    assert all(row["times_dense"] < 1.25 for row in rows(figures, "random", "sinks"))
    assert all(row["times_dense"] > 5 for row in rows(figures, "random", "stock"))


def test_a_trained_indexer_needs_no_help_and_takes_no_harm(figures):
    (stock,) = rows(figures, "trained", "stock")
    (sinks,) = rows(figures, "trained", "sinks")
    assert stock["times_dense"] < 1.1
    assert abs(sinks["perplexity"] / stock["perplexity"] - 1) < 0.02
    assert stock["skill"] > 0.9


def test_recency_rescues_an_indexer_of_the_wrong_rope_convention(figures):
    (stock,) = rows(figures, "RoPE flipped", "stock")
    (sinks,) = rows(figures, "RoPE flipped", "sinks")
    assert stock["times_dense"] > 1.15
    assert sinks["times_dense"] - 1 < (stock["times_dense"] - 1) / 4


@pytest.mark.newest
def test_the_demo_shows_one_text_while_everything_fits(tmp_path):
    """Prompt and answer are shorter than index_topk: no arm may differ."""
    demo = bench(
        "demo.py",
        *("--build", BUILD.with_name(f"{BUILD.name}-demo"), "--out", tmp_path),
        *("--max-tokens", 16, "--text-tokens", 160),
    )
    assert demo.status == 0, demo.stderr
    arms = json.loads((tmp_path / "demo.json").read_text())["arms"]
    assert list(arms) == ["stock", "sinks", "dense"]
    assert len({arm["text"] for arm in arms.values()}) == 1
    assert len(arms["stock"]["text"]) > 20
    assert arms["sinks"]["command"].startswith("MLX_SINKS=1 mlx_lm.generate ")
    for heading in ("sinks kept", "perplexity", "repeats"):
        assert heading in demo.stdout


@pytest.mark.newest
@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("failure_zoo.py --model nowhere --parts mine", "can't load nowhere"),
        ("failure_zoo.py --model nowhere --sinks -1 --parts mine", "sinks must be"),
        ("failure_zoo.py --model nowhere --seeds -1", "a whole number from 0"),
        (
            "failure_zoo.py --model nowhere --parts mine --out mine/notes.txt",
            "notes.txt: File exists",
        ),
        ("policy_sweep.py --model nowhere --parts mine", "can't load nowhere"),
        (f"{BUILDER} --out x --source gone", "'gone': no such folder, nor a hub id"),
        (f"{BUILDER} --out x --kind llama --index-topk 9", "leave out --index-topk"),
        (f"{BUILDER} --out x --kind llama --indexers trained", "out --indexers, or"),
        (f"{BUILDER} --out x --kind llama --seed 0", "leave out --seed"),
        (f"{BUILDER} --out x --indexers trained --seed 0", "leave it out"),
        (f"{BUILDER} --out x --share 4", "say --kind glm_moe_dsa"),
        (f"{BUILDER} --out x --kind glm_moe_dsa --share 1", "give 2 layers or more"),
        (f"{BUILDER} --out x --kind glm_moe_dsa --made-up", "goes with --share"),
        (f"{BUILDER} --out x --random-layers 3", "goes with --indexers trained"),
        (
            f"{BUILDER} --out x --kind glm_moe_dsa --share 4 --indexers trained "
            "--random-layers 5",
            "layer 5 is shared",
        ),
        (f"{BUILDER} --out x --index-topk 0", "--index-topk: a whole number >= 1"),
        (f"{BUILDER} --out mine", "is not a folder that this script wrote"),
        (f"{BUILDER} --out mine/notes.txt", "is not a folder that this script wrote"),
        (f"{BUILDER} --out x --indexers gone", "gone: no such file"),
        (
            f"{BUILDER} --out x --indexers trained --random-layers 30",
            "layer 30 isn't there",
        ),
        ("smollm2/train_indexer.py --model nowhere --out mine", "can't load"),
        ("demo.py --text-tokens 100", "--text-tokens must go past index_topk"),
        ("demo.py --out mine/notes.txt/x", "mine/notes.txt/x: Not a directory"),
    ],
)
def test_bad_input_gets_a_sentence_and_loses_nothing(
    command, sentence, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    notes = tmp_path / "mine" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    result = bench(*command.split())
    assert result.status in (1, 2)
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr
    assert sorted(tmp_path.rglob("*")) == [notes.parent, notes]
    assert notes.read_text() == "mine"
