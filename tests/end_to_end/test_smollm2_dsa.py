"""A real model whose random indexers lose its sinks, from the package index's weights.

The commands are those of the README; top-k 128 of 512 tokens has the ratio of 256 of
1,024 at a cost that a CPU without an optimised BLAS can bear.
"""

import json
import os
import sys
from pathlib import Path

import pytest

import build
from blas import with_fast_blas
from demo import repeated_share
from processes import run

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench" / "smollm2_dsa"
# One for each environment; the downloaded weights beside them are shared.
BUILD = ROOT / "build" / f"test-{Path(sys.prefix).name}"


def bench(script, *arguments, **variables):
    """As a user starts it; minutes where the machine has no optimised BLAS."""
    argv = (sys.executable, BENCH / script, *map(str, arguments))
    return run(*argv, limit=1800, **with_fast_blas({**os.environ, **variables}))


@pytest.fixture(scope="module")
def figures(request):
    """All arms for the seeds asked for."""
    folder = BUILD
    built = bench("build.py", "--out", folder, "--index-topk", 128)
    assert built.status == 0, built.stderr
    seeds = request.config.getoption("--smollm2-seeds")
    facts = ["--model", folder, "--tokens", 512, "--json", "--seeds", *seeds]
    # With the variable set, too, stock has to be stock.
    measured = bench("perplexity.py", *facts, MLX_SINKS="1")
    assert measured.status == 0, measured.stderr
    return json.loads(measured.stdout)["rows"]


def arm(figures, name):
    return [row for row in figures if row["arm"] == name]


def test_random_indexers_lose_sinks_and_the_guarantee_keeps_them(figures):
    assert all(row["sinks_kept"] < 0.6 for row in arm(figures, "stock"))
    assert all(row["sinks_kept"] == 1 for row in arm(figures, "sinks"))


def test_perplexity_is_near_dense_with_the_guarantee_and_far_without(figures):
    (dense,) = arm(figures, "dense")
    assert 30 < dense["perplexity"] < 60
    assert all(row["times_dense"] < 1.25 for row in arm(figures, "sinks"))
    assert all(row["times_dense"] > 5 for row in arm(figures, "stock"))


def test_the_demo_shows_one_text_while_everything_fits(tmp_path):
    """Prompt and answer are shorter than index_topk: no arm may differ."""
    out = tmp_path / "demo.json"
    demo = bench(
        "demo.py",
        *("--build", BUILD.with_name(f"{BUILD.name}-demo"), "--out", out),
        *("--max-tokens", 16, "--text-tokens", 160),
    )
    assert demo.status == 0, demo.stderr
    arms = json.loads(out.read_text())["arms"]
    assert list(arms) == ["stock", "sinks", "dense"]
    assert len({arm["text"] for arm in arms.values()}) == 1
    assert len(arms["stock"]["text"]) > 20
    assert arms["sinks"]["command"].startswith("MLX_SINKS=1 mlx_lm.generate ")
    for heading in ("sinks kept", "perplexity", "repeats"):
        assert heading in demo.stdout


@pytest.mark.parametrize(
    ("ids", "shares"),
    [
        (range(100), [0.0]),
        ([1] * 100, [0.99]),  # the first of them stands in no gram seen before
        ([*range(100), *range(100)], [0.0, 1.0]),
        ([*range(100), 1, 2, 3, *range(200, 297)], [0.0, 0.0]),
        ([*range(100), 1, 2, 3, 4, *range(200, 296)], [0.0, 0.04]),
        (range(140), [0.0]),
        ([], [0.0]),
    ],
)
def test_repeated_share(ids, shares):
    assert repeated_share(list(ids)) == pytest.approx(shares)


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("perplexity.py --model nowhere", "nowhere is no model folder"),
        ("perplexity.py --model nowhere --sinks -1", "sinks must be a whole"),
        ("perplexity.py --model nowhere --seeds -1", "a whole number from 0"),
        ("perplexity.py --model nowhere --out .", ". is a folder"),
        ("build.py --out x --source gone.gguf", "gone.gguf"),
        ("build.py --out x --source gone", "'gone': no such file or folder"),
        ("build.py --out x --index-topk 0", "--index-topk: a whole number >= 1"),
        ("build.py --out mine", "is not a folder that this script wrote"),
        ("build.py --out mine/notes.txt", "is not a folder that this script wrote"),
        ("demo.py --text-tokens 100", "--text-tokens must go past index_topk"),
        ("demo.py --out mine/notes.txt/x.json", "mine/notes.txt/x.json"),
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


def test_a_build_replaces_its_own_folder(figures, tmp_path):
    """Also one that has been run, and from a local folder as it is at the time."""
    (BUILD / "__pycache__").mkdir(exist_ok=True)  # as running it leaves
    built = bench("build.py", "--out", BUILD, "--index-topk", 64)
    assert built.status == 0, built.stderr
    for topk in (8, 16):
        options = ["--source", BUILD, "--out", tmp_path / "x", "--index-topk", topk]
        built = bench("build.py", *options)
        assert built.status == 0, built.stderr
    assert json.loads((tmp_path / "x" / "config.json").read_text())["index_topk"] == 16
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    names = [{path.name for path in at.iterdir()} for at in (BUILD, tmp_path / "x")]
    assert names[0] == names[1]


def test_a_conversion_that_another_build_has_finished_first(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "CACHE", tmp_path)
    folder = tmp_path / "model"

    def convert(origin, unfinished):
        for copy in (unfinished, folder):
            copy.mkdir(exist_ok=True)
            (copy / "weights").write_text(origin)

    assert build._cached(folder, convert, "the same", print) == folder
    assert (folder / "weights").read_text() == "the same"
    assert list(tmp_path.iterdir()) == [folder]
