"""The public names: one list, typed, and the ones that README and docs speak of."""

import importlib
import re
import sys
from pathlib import Path

import pytest

import mlx_sinks
from processes import python, run

ROOT = Path(__file__).parents[1]
PROSE = "\n".join(
    path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
)

# What a user may write, every name once.
SCRIPT = """
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import mlx_sinks

version: str = mlx_sinks.__version__
policy: mlx_sinks.SinkPolicy = mlx_sinks.SinkPolicy(sinks=4, recency=None)
asked: mlx_sinks.SinkPolicy | None = mlx_sinks.SinkPolicy.from_env()
reports: list[mlx_sinks.PatchReport] = mlx_sinks.install(policy, targets=["dsa"])
mlx_sinks.uninstall()
with mlx_sinks.patched() as inside:
    lines: list[str] = [str(report) for report in inside]


def use(model: nn.Module, prompt: mx.array) -> np.ndarray:
    parts: int = mlx_sinks.apply(model) + mlx_sinks.unapply(model)
    window: list = mlx_sinks.make_sink_cache(model, 1028, sinks=4)
    single: mlx_sinks.SinkCache = window[parts]
    several: mlx_sinks.BatchSinkCache = single.merge([single])
    method: mlx_sinks.SnapKV = mlx_sinks.SnapKV(256, window_size=32, kernel_size=7)
    cache: mlx_sinks.CompactPromptCache
    cache = mlx_sinks.compact_prompt_cache(model, prompt, method)
    cache = mlx_sinks.compact_prompt_cache(model, [1, 2], 256, prompt_cache=cache)
    reasons: dict[int, str] = cache.skipped_layers
    layer: mlx_sinks.CompactCache = cache[0]
    batch: mlx_sinks.BatchCompactCache = layer.merge([layer])
    rows: tuple[int, ...] = mlx_sinks.snapkv_keep_indices(300, 16, [0.0] * 300)
    columns: mx.array = mlx_sinks.snapkv_keep_columns(mx.zeros((1, 2, 300)), 16)
    recording: mlx_sinks.Recording
    with mlx_sinks.probe(model, policy, block=256, queries=8) as recording:
        model(prompt)
    recording.plot("a title").savefig("probe.png")
    return recording.metric("mass")


try:
    use(nn.Module(), mx.arange(3))
except (
    mlx_sinks.PolicyError,
    mlx_sinks.CheckpointError,
    mlx_sinks.PatchError,
    mlx_sinks.ProbeError,
):
    pass
"""


def test_each_name_is_there_and_no_other():
    for name in mlx_sinks.__all__:
        assert getattr(mlx_sinks, name) is not None
    assert set(mlx_sinks.__all__) <= set(dir(mlx_sinks))
    with pytest.raises(AttributeError, match="nothing"):
        mlx_sinks.nothing  # noqa: B018


def test_readme_and_docs_have_the_same_names():
    # The package's own files have paths, such as mlx_sinks.pth.
    spoken = set(re.findall(r"\bmlx_sinks\.(\w+)", PROSE))
    spoken -= {"pth", *(path.stem for path in ROOT.glob("mlx_sinks/*"))}
    assert spoken <= set(mlx_sinks.__all__)
    table = (ROOT / "docs" / "names.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \|", table, re.M)
    assert sorted([*listed, "__version__"]) == sorted(mlx_sinks.__all__)


def test_a_public_docstring_says_what_it_takes_returns_and_raises():
    for name in mlx_sinks.__all__:
        if name != "__version__":
            assert getattr(mlx_sinks, name).__doc__, name


@pytest.mark.newest
def test_a_users_script_passes_type_checking_and_an_unknown_name_fails(tmp_path):
    assert set(re.findall(r"\bmlx_sinks\.(\w+)", SCRIPT)) == set(mlx_sinks.__all__)
    importlib.import_module("mypy")
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "wrong.py").write_text("import mlx_sinks\nmlx_sinks.nothing\n")
    checked = run(
        *(sys.executable, "-m", "mypy", "--cache-dir", tmp_path / "cache"),
        *("script.py", "wrong.py"),
        cwd=tmp_path,
        limit=600,
        MYPYPATH=str(ROOT),
    )
    (error, summary) = checked.stdout.splitlines()
    assert 'wrong.py:2: error: Module has no attribute "nothing"' in error
    assert summary.startswith("Found 1 error in 1 file")


def test_the_names_are_read_once():
    """And are the same, whichever way a program asks first."""
    code = """
import lazy_loader
read, calls = lazy_loader.attach_stub, []
lazy_loader.attach_stub = lambda *where: calls.append(where) or read(*where)
import mlx_sinks
first = {first}
assert mlx_sinks.SinkPolicy is mlx_sinks.SinkPolicy
assert set(mlx_sinks.__all__) <= set(dir(mlx_sinks))
assert len(calls) == 1, calls
"""
    for first in ("mlx_sinks.SinkPolicy", "dir(mlx_sinks)", "mlx_sinks.__all__"):
        outcome = python(code.format(first=first))
        assert (outcome.status, outcome.stderr) == (0, ""), first
