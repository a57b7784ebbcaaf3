"""The laws that hold for every target, whatever it replaces."""

import functools
import importlib
import re
from pathlib import Path
from types import ModuleType

import mlx.core as mx
import pytest
from packaging.specifiers import SpecifierSet

import mlx_sinks
import releases
from mlx_sinks import PatchError, SinkPolicy, logger
from mlx_sinks.patches import registry
from mlx_sinks.patches.patch import Patch, trying
from mlx_sinks.targets import TARGETS

README = Path(__file__).parents[2] / "README.md"
# Asks for every target.
POLICY = SinkPolicy(sinks=2, recency=3, kv_budget=16)


@pytest.fixture(params=TARGETS)
def patch(request):
    """Each target's patch, its upstream imported; none without the package."""
    if not TARGETS[request.param].installed:
        pytest.skip(f"{TARGETS[request.param].package} isn't installed")
    importlib.import_module(TARGETS[request.param].module)
    return registry.patch_of(request.param)


@pytest.fixture
def module(patch):
    return importlib.import_module(patch.target.module)


def in_place(patch, module):
    """What stands at each site: (holder, name, function or class)."""
    return [(site.holder, site.name, site.found) for site in patch.sites(module)]


def bound(holder, name, function):
    """The function as its holder has it, a class method where there is one."""
    is_method = isinstance(vars(holder)[name], classmethod)
    return classmethod(function) if is_method else function


def install(patch, policy=POLICY):
    return mlx_sinks.install(policy, targets=[patch.target.name])


def test_its_row_says_where_it_is(patch, module):
    target = patch.target
    assert isinstance(patch, Patch)
    assert module.__name__ == target.module
    assert target.root == target.module.split(".")[0]
    assert target.version() in SpecifierSet(target.tested)


def test_the_readme_has_a_row_for_each_and_no_other():
    (table,) = re.findall(
        r"^\| target \|.*\n\| -.*\n((?:\|.*\n)+)", README.read_text(), re.M
    )
    assert set(re.findall(r"^\| `(\w+)`", table, re.M)) == TARGETS.keys()


def test_it_finds_its_fault_and_mends_it(patch, module):
    stock = patch.faults(module)
    install(patch)
    assert patch.is_on(module)
    assert patch.faults(module) == []
    # What mlx-lm has no fault in, ours adds.
    assert bool(stock) == (patch.target.name != "snapkv")


def test_a_policy_that_mends_nothing_says_so(patch, module):
    nothing = SinkPolicy(sinks=0, recency=0, kv_budget=16)
    install(patch, nothing)
    assert not (patch.faults(module) and patch.mends(nothing))
    assert patch.mends(POLICY)


def test_the_upstream_that_is_installed_is_not_refused(patch, module):
    assert patch.refusal(module) is None
    install(patch)
    assert patch.refusal(module) is None


def test_uninstalling_restores_the_very_code(patch, module):
    before = in_place(patch, module)
    install(patch)
    assert in_place(patch, module) != before
    mlx_sinks.uninstall()
    assert in_place(patch, module) == before
    assert not patch.is_on(module)


def test_blocks_nest_and_leave_nothing(patch, module):
    outer, inner = POLICY, SinkPolicy(sinks=1, recency=1, kv_budget=8)
    names = [patch.target.name]
    with mlx_sinks.patched(outer, names):
        with mlx_sinks.patched(inner, names):
            assert patch._policy == inner
        assert patch._policy == outer
    assert patch._policy is None
    assert not patch.is_on(module)


def test_a_policy_that_does_not_want_it_leaves_upstream(patch, module):
    wanted = patch.wanted(SinkPolicy())
    install(patch, SinkPolicy())
    assert patch.is_on(module) == wanted


@pytest.mark.parametrize(
    ("release", "said"),
    [("0.1", "0.1 (untested)"), ("99.0", "99.0 (untested)"), (None, "of an unknown")],
)
def test_an_untested_release_is_tried_and_said(
    patch, module, monkeypatch, release, said
):
    """By its self-check: the code is that of the release that is installed."""
    releases.pretend(monkeypatch, patch.target.package, release)
    (report,) = install(patch)
    assert patch.is_on(module)
    assert f"{patch.target.package} {said}" in str(report)


def by_the_environment(patch):
    names = [patch.target.name]
    return registry.install_from_environment(POLICY, names)


@pytest.fixture
def failing(patch, monkeypatch):
    """A patch whose self-check fails, for whatever reason."""
    monkeypatch.setattr(patch, "self_check", lambda module: "it differs")
    return patch


def test_what_fails_its_self_check_is_not_installed(failing, module):
    before = in_place(failing, module)
    with pytest.raises(PatchError, match=rf"{failing.target.name} \(it differs\)"):
        install(failing)
    assert in_place(failing, module) == before


def test_under_the_variable_its_import_passes_and_stock_code_can_be_tried(
    failing, module
):
    """What would run wrongly is refused when it is called: see the guards below."""
    stock = failing.faults(module)
    assert by_the_environment(failing) == []
    assert not failing.is_on(module)
    wrong = failing.runs_wrongly(module)  # what is only slower runs as it is
    assert failing.stands_guard == wrong
    assert failing.refusal(module) == "it differs"
    with mlx_sinks.patched(targets=[]):
        assert failing.stands_guard == wrong
    token = trying.set(True)
    try:
        assert failing.faults(module) == stock
    finally:
        trying.reset(token)
    mlx_sinks.uninstall()
    assert not failing.stands_guard and failing.refused is None


def test_guards_leave_nothing(failing, module):
    places = [(vars(holder), name) for holder, name, _ in in_place(failing, module)]
    places += [(vars(site.holder), site.name) for site in failing.guards(module, None)]

    def found():
        values = [holder[name] for holder, name in places]
        return [getattr(value, "__func__", value) for value in values]

    before = found()
    by_the_environment(failing)
    assert (found() != before) == failing.runs_wrongly(module)
    mlx_sinks.uninstall()
    assert found() == before


def test_what_has_no_fault_is_not_refused(failing, module, monkeypatch):
    """A release that has mended it by itself, whatever its code looks like."""
    monkeypatch.setattr(failing, "runs_wrongly", lambda module: False)
    assert by_the_environment(failing) == []
    assert not failing.stands_guard
    assert not any(site.leads_to_ours for site in failing.sites(module))


def test_a_package_that_is_not_installed_is_skipped_or_named(
    patch, module, monkeypatch
):
    with monkeypatch.context() as context:
        others = property(lambda target: target is not patch.target)
        context.setattr(type(patch.target), "installed", others)
        targets = {report.target for report in mlx_sinks.install(POLICY)}
        assert targets == TARGETS.keys() - {patch.target.name}
    mlx_sinks.uninstall()
    assert not patch.is_on(module)


def replaced(value):
    """Somebody else's code in the place of a site's."""

    def replacement(*arguments, **named):
        raise AssertionError("never called")

    theirs = type(value.__name__, (), {}) if isinstance(value, type) else replacement
    theirs.__module__ = theirs.__qualname__ = "another_tool"
    return theirs


def wrapped(value):
    """Somebody else's code around what stands at a site."""
    if isinstance(value, type):
        return type("another_tool", (value,), {"__module__": "another_tool"})
    wrapper = functools.wraps(value)(lambda *given, **named: value(*given, **named))
    wrapper.__qualname__ = "another_tool"
    return wrapper


@pytest.mark.parametrize("made", [replaced, wrapped])
def test_code_of_another_tool_is_not_replaced(patch, module, monkeypatch, made):
    for holder, name, value in in_place(patch, module):
        theirs = made(value)
        with monkeypatch.context() as context:
            context.setattr(holder, name, bound(holder, name, theirs))
            if (holder, name, theirs) not in in_place(patch, module):
                continue  # a module that imported upstream's, and now has its own
            with pytest.raises(PatchError, match="another_tool"):
                install(patch)
            assert (holder, name, theirs) in in_place(patch, module)
        assert not patch.is_on(module)


def test_code_wrapped_around_ours_is_left(patch, module, monkeypatch):
    install(patch)
    theirs = [(*place, wrapped(value)) for *place, value in in_place(patch, module)]
    for holder, name, wrapper in theirs:
        monkeypatch.setattr(holder, name, bound(holder, name, wrapper))
    mlx_sinks.uninstall()
    for holder, name, wrapper in theirs:
        assert getattr(vars(holder)[name], "__func__", vars(holder)[name]) is wrapper
    for _ in range(2):
        with mlx_sinks.patched(POLICY, [patch.target.name]):
            assert patch.is_on(module)
    monkeypatch.undo()  # ours again, and nobody asks for it
    install(patch)
    assert patch.is_on(module)
    mlx_sinks.uninstall()
    assert not patch.is_on(module)


def test_functions_left_in_place_pass_through(patch, module, monkeypatch):
    """With nothing in force ours hands on to upstream's, whatever the arguments."""
    for site in patch.sites(module):
        if isinstance(site.ours, type):
            continue
        upstream = functools.wraps(site.found)(lambda *given, **named: (given, named))
        passed = patch._around(site.ours, upstream, 1, 2, three=3)
        assert passed == ((1, 2), {"three": 3})


def test_a_failure_half_way_restores_everything(patch, module, monkeypatch):
    before = in_place(patch, module)
    sites = list(patch.sites(module))

    def fail_at_the_last(*_):
        yield from sites
        raise RuntimeError("half way")

    monkeypatch.setattr(patch, "refusal", lambda module: None)
    monkeypatch.setattr(patch, "_known", lambda module: sites)
    monkeypatch.setattr(patch, "sites", fail_at_the_last)
    with pytest.raises(RuntimeError, match="half way"):
        install(patch)
    monkeypatch.undo()
    assert in_place(patch, module) == before


def test_an_upstream_without_its_places(patch):
    empty = ModuleType(patch.target.module)
    assert not patch.is_on(empty)
    patch.uninstall(empty)
    assert "self-check failed" in patch.refusal(empty)


def test_installing_leaves_the_random_numbers_alone(patch):
    mx.random.seed(11)
    expected = mx.random.uniform(shape=(4,))
    mx.random.seed(11)
    install(patch)
    assert mx.array_equal(mx.random.uniform(shape=(4,)), expected)


def test_its_line_is_said_once(patch, capsys):
    logger.said.cache_clear()
    (report,) = install(patch)
    install(patch)
    assert capsys.readouterr().err == ""  # when it first matters
    for _ in range(2):
        patch.say()
    assert capsys.readouterr().err == f"{report}\n"
    for words in (patch.keeps(POLICY), patch.target.module, patch.target.package):
        assert words in str(report)
    mlx_sinks.uninstall()
    logger.said.cache_clear()
    patch.say()
    assert capsys.readouterr().err == ""
