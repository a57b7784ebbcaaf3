"""Functions of upstream's that several patches have a part in."""

import importlib
import itertools
import sys

import pytest

import mlx_sinks
from mlx_sinks import PatchError, SinkPolicy
from mlx_sinks.patches import registry

NAMES = ("rotating", "snapkv")
POLICY = SinkPolicy(kv_budget=40)
PLACES = ("generate_step", "speculative_generate_step", "stream_generate")


@pytest.fixture
def generate():
    return importlib.import_module("mlx_lm.generate")


def found(generate):
    return [vars(generate)[name] for name in PLACES]


def links(function):
    mark = getattr(function, "sinks_mark", None)
    return [] if mark is None else [link.order for link in mark.links]


@pytest.mark.parametrize("order", [*itertools.permutations(NAMES)])
@pytest.mark.parametrize("ended", [0, 1])
def test_they_come_and_go_in_any_order(generate, order, ended):
    before = found(generate)
    blocks = [mlx_sinks.patched(POLICY, [name]) for name in order]
    for block in blocks:
        block.__enter__()
    assert len(links(generate.generate_step)) == 2
    assert sorted(links(generate.generate_step)) == links(generate.generate_step)
    blocks.pop(ended).__exit__(None, None, None)
    (left,) = set(NAMES) - {order[ended]}
    assert registry.patch_of(left).is_there
    assert not registry.patch_of(order[ended]).is_there
    assert len(links(generate.generate_step)) == 1
    blocks.pop().__exit__(None, None, None)
    assert found(generate) == before


def test_a_line_about_a_model_comes_after_what_changes_its_caches(generate):
    """It tells of the caches that a model is called with."""
    mlx_sinks.install(POLICY, targets=["snapkv"])
    mlx_sinks.install(POLICY, targets=["rotating"])
    *_, last = generate.stream_generate.sinks_mark.links
    assert last.ours.__self__ is registry._line
    assert links(generate.stream_generate)[0] < last.order


def test_another_tools_code_around_one_part_stays(generate, monkeypatch):
    mlx_sinks.install(POLICY, targets=["rotating"])
    ours = generate.generate_step

    def wrapper(*arguments, **named):
        return ours(*arguments, **named)

    vars(wrapper).update(vars(ours))
    monkeypatch.setattr(generate, "generate_step", wrapper)
    mlx_sinks.install(POLICY, targets=["snapkv"])
    assert generate.generate_step is wrapper
    assert len(links(wrapper)) == 2
    mlx_sinks.uninstall()
    assert generate.generate_step is wrapper
    assert links(wrapper) == []


def test_another_tools_code_in_the_place_of_one_part_is_refused(generate, monkeypatch):
    mlx_sinks.install(POLICY, targets=["rotating"])
    monkeypatch.setattr(generate, "generate_step", lambda *_: None)
    with pytest.raises(PatchError, match="generate_step|<lambda>"):
        mlx_sinks.install(POLICY, targets=["snapkv"])
    assert not registry.patch_of("snapkv").is_there
    monkeypatch.undo()
    assert "mlx_lm.generate" in sys.modules
