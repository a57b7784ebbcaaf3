"""Indexers that were distilled, beside random ones: how they are made and told apart.

Apart from test_smollm2.py, so that both can run at the same time: without an
optimised BLAS each takes minutes.
"""

import json
import os
import random
import sys

import pytest

from processes import BENCH, bench, command, interrupted, run
from tools.blas import with_fast_blas

BUILDER = "smollm2/build.py"
TEXT = BENCH / "smollm2" / "text.txt"


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """Trained indexers, but for five layers that depend on the seed; those layers."""
    (seed, *_) = request.config.getoption("--smollm2-seeds")
    sick = sorted(random.Random(int(seed)).sample(range(30), 5))
    path = tmp_path_factory.mktemp("mixed") / "model"
    options = ["--indexers", "trained", "--random-layers", *sick, "--seed", seed]
    built = bench(BUILDER, "--out", path, "--index-topk", 96, *options)
    assert built.status == 0, built.stderr
    return path, sick


def test_the_probe_names_the_layers_whose_indexer_is_random(folder):
    """By skill: the mass alone would not do, since some trained layers are diffuse."""
    path, sick = folder
    probed = run(
        *(command("mlx-sinks"), "probe", "--model", path, "--text", TEXT),
        *("--tokens", "320", "--json"),
        limit=1800,
        **with_fast_blas(dict(os.environ)),
    )
    assert probed.status == 0, probed.stderr
    result = json.loads(probed.stdout)
    names = {f"model.layers.{number}.self_attn" for number in sick}
    assert set(result["suspects"]) == names


@pytest.mark.newest
def test_training_goes_on_where_it_was_stopped(tmp_path):
    """To the same weights as in one go, and the divergence falls."""
    llama = tmp_path / "llama"
    assert bench(BUILDER, "--out", llama, "--kind", "llama").status == 0
    facts = ["--model", llama, "--length", 48, "--stretches", 8, "--queries", 16]
    facts += ["--seeds", 0, 1, "--text", TEXT, __file__]
    script = "smollm2/train_indexer.py"
    whole = bench(script, *facts, "--out", tmp_path / "whole")
    assert whole.status == 0, whole.stderr
    parts = tmp_path / "parts"
    stopped = interrupted(
        *(sys.executable, BENCH / script, *facts, "--out", parts),
        when=(parts / "partial.safetensors").exists,
        **with_fast_blas(dict(os.environ)),
    )
    assert stopped.status == 130, stopped.stderr
    assert "the same command goes on" in stopped.stderr
    other = bench(script, *facts, "--rate", 1, "--out", tmp_path / "parts")
    assert other.status == 1 and "of a run with other options" in other.stderr
    rest = bench(script, *facts, "--out", tmp_path / "parts")
    assert rest.status == 0, rest.stderr
    names = ["seed0.json", "seed0.safetensors", "seed1.json", "seed1.safetensors"]
    for name in names:
        files = [(tmp_path / way / name).read_bytes() for way in ("whole", "parts")]
        assert files[0] == files[1]
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == names
    losses = json.loads((tmp_path / "whole" / "seed1.json").read_text())["losses"]
    assert len(losses) == 8
    assert sum(losses[-2:]) < 0.8 * sum(losses[:2])


def test_the_shipped_weights_are_small_and_say_where_they_come_from():
    weights = BENCH / "smollm2" / "trained" / "seed0.safetensors"
    assert weights.stat().st_size < 6_000_000
    record = json.loads(weights.with_suffix(".json").read_text())
    assert record["seed"] == 0
    assert len(record["texts"]) >= 3
    assert all(text["text"] and len(text["sha256"]) == 64 for text in record["texts"])
    assert record["losses"][-1] < record["losses"][0] / 5
