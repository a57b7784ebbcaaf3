"""Who asked for what, and what is in force: install, uninstall, nesting, threads."""

import contextlib
import functools
import importlib
import sys
import threading
import types

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models import deepseek_v32

import mlx_sinks
import small_models
from mlx_sinks import PatchError, SinkPolicy
from mlx_sinks.patches import registry
from threads import lasting

UPSTREAM = deepseek_v32.Indexer.__call__


def is_on():
    return deepseek_v32.Indexer.__call__ is not UPSTREAM


def policy_in_force():
    return registry.patch_of("dsa")._policy


def select():
    """One selection of an indexer that belongs to no model."""
    small = small_models.make().layers[0].self_attn
    x, qr = (mx.zeros((1, 20, size)) for size in (64, 64))
    small.indexer(x, qr, None)


def test_install_and_uninstall_are_idempotent():
    mlx_sinks.install()
    mlx_sinks.install()
    assert is_on()
    mlx_sinks.uninstall()
    assert not is_on()
    mlx_sinks.uninstall()
    assert not is_on()


def test_the_report_names_versions_and_policy(capsys):
    (report,) = mlx_sinks.install(SinkPolicy(3, 5), targets=["dsa"])
    assert report.target == "dsa"
    assert report.policy == SinkPolicy(3, 5)
    for part in (mlx_lm.__version__, mx.__version__, "3 sinks", "5 recent"):
        assert part in str(report)
    select()  # an indexer alone, of no model that was told of
    assert capsys.readouterr().err == f"{report}\n"


def test_a_line_is_said_once_and_not_at_all_when_quiet(capsys, monkeypatch):
    for _ in range(2):
        with mlx_sinks.patched(SinkPolicy(1, 2), ["dsa"]):
            select()
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setenv("MLX_SINKS_QUIET", "1")
    mlx_sinks.install(SinkPolicy(1, 3))
    select()
    assert capsys.readouterr().err == ""


def test_a_second_install_replaces_the_policy():
    mlx_sinks.install(SinkPolicy(1, 1))
    mlx_sinks.install(SinkPolicy(2, 2))
    assert policy_in_force() == SinkPolicy(2, 2)


def test_a_block_leaves_what_was_installed():
    mlx_sinks.install(SinkPolicy(1, 1))
    with pytest.raises(KeyError), mlx_sinks.patched(SinkPolicy(2, 2)):
        raise KeyError
    assert policy_in_force() == SinkPolicy(1, 1)


@pytest.mark.parametrize("error", [None, KeyError])
def test_a_block_ends_though_somebody_replaced_ours_inside(monkeypatch, error):
    mlx_sinks.install(SinkPolicy(1, 1), ["dsa"])
    with contextlib.suppress(KeyError), mlx_sinks.patched(SinkPolicy(2, 2), ["dsa"]):
        monkeypatch.setattr(deepseek_v32.Indexer, "__call__", lambda *_: None)
        if error:
            raise error
    monkeypatch.undo()
    assert policy_in_force() == SinkPolicy(1, 1)


def test_install_inside_a_block_outlives_it():
    with mlx_sinks.patched(SinkPolicy(1, 1)):
        mlx_sinks.install(SinkPolicy(2, 2))
        assert policy_in_force() == SinkPolicy(2, 2)
    assert policy_in_force() == SinkPolicy(2, 2)


def test_uninstall_inside_a_block_ends_everything():
    with mlx_sinks.patched():
        mlx_sinks.uninstall()
        assert not is_on()
    assert not is_on()


def test_the_program_goes_before_the_environment():
    mlx_sinks.install(SinkPolicy(1, 1))
    registry.install_from_environment(SinkPolicy(2, 2), ["dsa"])
    assert policy_in_force() == SinkPolicy(1, 1)


def test_overlapping_blocks_of_two_threads():
    """The first to leave must not take the other's patch away."""
    entered, leave = threading.Event(), threading.Event()
    states = []

    def other():
        with mlx_sinks.patched(SinkPolicy(2, 2)):
            entered.set()
            leave.wait(60)
            states.append((is_on(), policy_in_force()))

    with mlx_sinks.patched(SinkPolicy(1, 1)):
        thread = lasting(other)
        assert entered.wait(60)
    leave.set()
    thread.result(60)
    assert states == [(True, SinkPolicy(2, 2))]
    assert not is_on()


def test_many_threads_at_once_leave_upstream_as_it_was():
    def use():
        for number in range(20):
            with mlx_sinks.patched(SinkPolicy(number, number)):
                assert is_on()

    for thread in [lasting(use) for _ in range(8)]:
        thread.result(60)
    assert not is_on()


class TestApply:
    def test_gives_one_model_its_own_policy(self, selections):
        ours, other = (small_models.make(seed=seed) for seed in (0, 1))
        assert mlx_sinks.apply(ours, SinkPolicy(2, 2)) == 2
        inputs = mx.arange(24)[None]
        selections.clear()  # the self-check's
        mx.eval(other(inputs))
        assert not selections
        mx.eval(ours(inputs))
        assert len(selections) == 2

    def test_goes_before_the_installed_policy(self):
        model = small_models.make()
        mlx_sinks.install(SinkPolicy(1, 1))
        mlx_sinks.apply(model, SinkPolicy(small_models.INDEX_TOPK))
        with pytest.raises(ValueError, match="sinks=16"):
            model(mx.arange(4)[None])

    def test_unapply_takes_it_away_again(self, selections):
        model = small_models.make()
        mlx_sinks.apply(model, SinkPolicy(2, 2))
        assert mlx_sinks.unapply(model) == 2
        selections.clear()  # the self-check's
        mx.eval(model(mx.arange(24)[None]))
        assert not selections

    def test_does_not_hide_what_is_installed_later(self):
        mlx_sinks.apply(small_models.make(), SinkPolicy(2, 2))
        mlx_sinks.install(SinkPolicy(1, 1))
        assert policy_in_force() == SinkPolicy(1, 1)

    def test_other_models_are_refused(self):
        with pytest.raises(ValueError, match="no layer that mlx-sinks patches"):
            mlx_sinks.apply(small_models.make_llama(), SinkPolicy())

    def test_something_else_for_a_model(self):
        with pytest.raises(TypeError, match="model must be an mlx.nn.Module, not None"):
            mlx_sinks.apply(None, SinkPolicy())


@pytest.mark.parametrize("policy", [4, "sinks=4", (4, 64)])
def test_something_else_for_a_policy(policy):
    with pytest.raises(TypeError, match="SinkPolicy"):
        mlx_sinks.install(policy)
    assert not is_on()


def test_an_unknown_target_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'rotary', 3.*dsa"):
        mlx_sinks.install(targets=["rotary", 3])


def test_a_refused_request_undoes_all_of_itself_and_names_what_refused(monkeypatch):
    """Also where a patch that was in force before can't be kept either."""
    rotating = importlib.import_module("mlx_lm.models.cache")
    mlx_sinks.install(SinkPolicy(1, 1), ["index_share", "rotating"])
    theirs = importlib.import_module("mlx_lm.models.glm_moe_dsa")
    with monkeypatch.context() as context:
        context.setattr(theirs, "Model", type("Model", (), {"__module__": "theirs"}))
        with pytest.raises(PatchError, match="code of theirs") as refused:
            mlx_sinks.install(SinkPolicy(2, 2), ["rotating"])
        assert refused.value.__context__ is None
    for name, module in (("rotating", rotating), ("index_share", theirs)):
        assert registry.patch_of(name).is_on(module)
        assert registry.patch_of(name)._policy == SinkPolicy(1, 1)


def test_a_helper_that_wraps_upstreams_in_a_module_of_its_own_is_left(monkeypatch):
    upstream = importlib.import_module("mlx_lm.models.cache").make_prompt_cache
    theirs = types.ModuleType("theirs")
    theirs.make_prompt_cache = functools.wraps(upstream)(lambda *a, **b: upstream(*a))
    monkeypatch.setitem(sys.modules, "theirs", theirs)
    helper = theirs.make_prompt_cache
    mlx_sinks.install()
    assert theirs.make_prompt_cache is helper


class TestRefusal:
    """A reason in the sentence, upstream untouched, earlier wishes in force."""

    @pytest.fixture(autouse=True)
    def untouched(self):
        yield
        assert not is_on()

    @pytest.mark.parametrize(
        "change",
        [
            lambda columns: columns[..., ::-1] // 2,
            lambda columns: columns[..., 1:],
            lambda columns: None,
        ],
    )
    def test_of_an_upstream_that_selects_otherwise(self, monkeypatch, change):
        def changed(self, x, qr, mask, cache=None):
            return change(UPSTREAM(self, x, qr, mask, cache))

        changed.__module__ = deepseek_v32.__name__
        monkeypatch.setattr(deepseek_v32.Indexer, "__call__", changed)
        with pytest.raises(PatchError, match=r"self-check|differs from upstream's"):
            mlx_sinks.install()
        monkeypatch.undo()

    def test_of_an_upstream_that_stores_otherwise(self, monkeypatch):
        def changed(self, x, qr, mask, cache=None):
            columns = UPSTREAM(self, x, qr, mask, cache)
            cache.keys = cache.keys * 2
            return columns

        changed.__module__ = deepseek_v32.__name__
        monkeypatch.setattr(deepseek_v32.Indexer, "__call__", changed)
        with pytest.raises(PatchError, match="differs from upstream's in"):
            mlx_sinks.install()
        monkeypatch.undo()

    def test_of_another_signature(self, monkeypatch):
        def changed(self, x, mask):
            raise AssertionError("never called")

        changed.__module__ = deepseek_v32.__name__
        monkeypatch.setattr(deepseek_v32.Indexer, "__call__", changed)
        with pytest.raises(PatchError, match="self-check failed with TypeError"):
            mlx_sinks.install()
        monkeypatch.undo()


def test_code_wrapped_after_us_is_left_and_runs_upstream(monkeypatch):
    mlx_sinks.install()
    ours = deepseek_v32.Indexer.__call__

    def theirs(self, x, qr, mask, cache=None):
        return ours(self, x, qr, mask, cache)

    monkeypatch.setattr(deepseek_v32.Indexer, "__call__", theirs)
    mlx_sinks.uninstall()
    assert deepseek_v32.Indexer.__call__ is theirs
    inputs = mx.arange(24)[None]
    model = small_models.make()
    through_theirs = model(inputs)
    monkeypatch.setattr(deepseek_v32.Indexer, "__call__", UPSTREAM)
    assert mx.array_equal(through_theirs, model(inputs))


def test_code_that_wraps_ours_well_is_reached_through(monkeypatch, selections):
    mlx_sinks.install(SinkPolicy(1, 1))
    theirs = functools.wraps(deepseek_v32.Indexer.__call__)(
        lambda self, *rest, ours=deepseek_v32.Indexer.__call__, **named: ours(
            self, *rest, **named
        )
    )
    monkeypatch.setattr(deepseek_v32.Indexer, "__call__", theirs)
    mlx_sinks.install(SinkPolicy(2, 2))
    selections.clear()
    mx.eval(small_models.make()(mx.arange(24)[None]))
    assert len(selections) == 2
    assert policy_in_force() == SinkPolicy(2, 2)


def test_install_after_somebody_restored_upstream(monkeypatch):
    mlx_sinks.install()
    monkeypatch.setattr(deepseek_v32.Indexer, "__call__", UPSTREAM)
    mlx_sinks.install()
    assert is_on()


def test_install_after_a_second_import(monkeypatch):
    """A reload makes a new Indexer; a report must not speak of the old one."""
    mlx_sinks.install()
    name = deepseek_v32.__name__
    monkeypatch.delitem(sys.modules, name)
    again = importlib.import_module(name)
    upstream = again.Indexer.__call__
    mlx_sinks.install()
    assert again.Indexer.__call__ is not upstream
    mlx_sinks.uninstall()
    assert again.Indexer.__call__ is upstream
    monkeypatch.undo()
    mlx_lm.models.deepseek_v32 = deepseek_v32
    deepseek_v32.Indexer.__call__ = UPSTREAM
