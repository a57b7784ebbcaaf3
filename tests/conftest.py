"""No sink is lost in any test: every selection that an indexer makes is looked at."""

import os
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from packaging.version import Version

import mlx_sinks
import oracle
from mlx_sinks.sparse import indexer

if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    # On a CPU mlx compiles kernels into files, and loads one that another process has
    # not finished: each worker has its own, for the processes too that it starts.
    scratch = Path(__file__).parents[1] / "build" / "kernels"
    scratch /= f"{Path(sys.prefix).name}-{worker}"
    scratch.mkdir(parents=True, exist_ok=True)
    os.environ["TMPDIR"] = str(scratch)


@pytest.fixture(autouse=True)
def upstream_restored(monkeypatch):
    """No test starts or ends patched, whatever the shell that runs them has set."""
    monkeypatch.delenv("MLX_SINKS", raising=False)
    monkeypatch.delenv("MLX_SINKS_QUIET", raising=False)
    mlx_sinks.uninstall()
    yield
    mlx_sinks.uninstall()


@pytest.fixture(autouse=True)
def selections(monkeypatch):
    """Holds each selection against the oracle; the (B, L, T) of all that were made."""
    select = indexer.select_columns
    made, lost = [], []

    def watched(scores, index_topk, policy, left_padding=None, mask=None):
        columns = select(scores, index_topk, policy, left_padding, mask)
        B, _, L, T = scores.shape
        forced = oracle.forced_columns(
            policy.sinks,
            oracle.clamped_recency(policy.sinks, policy.recency, index_topk),
            B,
            L,
            T,
            None if left_padding is None else left_padding.tolist(),
            None if mask is None else np.array(mask),
        )
        selected = np.zeros((B, 1, L, T), bool)
        np.put_along_axis(selected, np.array(columns).astype(int), True, axis=-1)
        made.append((B, L, T))
        if (forced & ~selected).any():
            lost.append((B, L, T))
        return columns

    monkeypatch.setattr(indexer, "select_columns", watched)
    yield made
    assert not lost, f"forced columns lost in selections of (B, L, T) = {lost}"


def pytest_addoption(parser):
    parser.addoption(
        "--smollm2-seeds",
        nargs="+",
        default=["0"],
        help="seeds of SmolLM2's random indexers",
    )
    parser.addoption(
        "--zoo",
        nargs="+",
        default=["random", "trained", "RoPE flipped"],
        help="kinds of SmolLM2's indexers",
    )


def pytest_collection_modifyitems(items):
    if Version(version("mlx-lm")) < Version("0.32.0"):
        reason = "costly, and about no release: the newest end runs it"
        for item in items:
            if item.get_closest_marker("newest"):
                item.add_marker(pytest.mark.skip(reason=reason))
