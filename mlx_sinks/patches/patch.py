"""The base of all patches: it replaces upstream's code, and puts it back."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..policy import SinkPolicy
from ..targets import TARGETS, Target

# Whether upstream is being tried: then nothing is refused, whatever it calls.
trying: ContextVar[bool] = ContextVar("trying", default=False)


class PatchError(RuntimeError):
    """An upstream that can't be patched; it is left as it was."""


@dataclass(frozen=True)
class _Link:
    """What one patch does around a function of upstream's.

    Parameters
    ----------
    order : int
        Links of lower order come first, further from upstream's function.
    ours : callable
        By which the patch knows its link.
    around : callable
        Called with the next link, or upstream's function, and the call's arguments.
    """

    order: int
    ours: Callable
    around: Callable


class _Mark:
    """What stands in the place of upstream's code, and what it replaces.

    Several patches share a function of upstream's: each has a link.
    """

    def __init__(self, upstream: Any, ours: type | None = None):
        self.upstream = upstream
        self.links: list[_Link] = []
        self._call = upstream
        self.ours = self._function() if ours is None else ours
        self.ours.sinks_mark = self

    def link(self, links: Iterable[_Link]) -> None:
        """Have calls go through these links, and no other."""
        self.links = sorted(links, key=lambda link: link.order)
        call = self.upstream
        for link in reversed(self.links):
            around = functools.partial(link.around, call)
            call = functools.update_wrapper(around, self.upstream)
        self._call = call

    def _function(self) -> Callable:
        @functools.wraps(self.upstream)
        def function(*arguments, **named):
            return self._call(*arguments, **named)

        return function


def _mark_of(code: Any) -> _Mark | None:
    """The mark of ours; a wrapper or subclass of it has it too."""
    return getattr(code, "sinks_mark", None)


def upstream_of(code: Any) -> Any:
    """The code that ours replaces, or ``code`` itself where it is none of ours."""
    mark = _mark_of(code)
    return code if mark is None else mark.upstream


@dataclass(frozen=True)
class Site:
    """One function or class of upstream's that a patch replaces.

    Parameters
    ----------
    holder : module or class
        What holds it.
    name : str
        Its name there.
    ours : callable or type
        A function is called with the policy in force, upstream's function, and the
        call's arguments. A class replaces upstream's, of which it is a subclass.
    home : str, optional
        The module that defines it; by default the patch's, or that of ``holder``.
    """

    holder: Any
    name: str
    ours: Callable | type
    home: str | None = None

    @property
    def found(self) -> Any:
        """What is there now; for a class method, its function."""
        value = vars(self.holder)[self.name]
        return getattr(value, "__func__", value)

    @property
    def upstream(self) -> Any:
        """Upstream's code, whether ours replaces it or not."""
        return self.replaced or self.found

    @property
    def replaced(self) -> Any | None:
        """What ours replaces; ``None`` where something else is there."""
        mark = _mark_of(self.found)
        return mark.upstream if mark and mark.ours is self.found else None

    @property
    def leads_to_ours(self) -> bool:
        """Whether calls reach ours, also through a wrapper or subclass of it."""
        mark = _mark_of(self.found)
        if mark is None or isinstance(mark.ours, type):
            return mark is not None
        return any(link.ours == self.ours for link in mark.links)

    def lead(self, order: int, around: Callable) -> None:
        """Have calls reach ours: a class as it is, a function as one of the links."""
        if self.leads_to_ours:
            return
        if isinstance(self.ours, type):
            return self._put(_Mark(self.found, self.ours).ours)
        mark = _mark_of(self.found)
        if mark is None:
            mark = _Mark(self.found)
            self._put(mark.ours)
        mark.link([*mark.links, _Link(order, self.ours, around)])

    def restore(self) -> None:
        """Take ours away, and put upstream's code back where no other link is left."""
        mark = _mark_of(self.found)
        if mark is not None:
            mark.link(each for each in mark.links if each.ours != self.ours)
            if mark.ours is self.found and not mark.links:
                self._put(mark.upstream)

    def _put(self, value: Any) -> None:
        bound = isinstance(vars(self.holder)[self.name], classmethod)
        setattr(self.holder, self.name, classmethod(value) if bound else value)

    def strange(self, module: str) -> str | None:
        """Whose code is there, if it is neither ours nor upstream's."""
        code = self.upstream
        home = self.home or getattr(self.holder, "__module__", module)
        if isinstance(code, type) and code not in self.ours.__mro__:
            if code.__module__ == home:
                return f"{self.name} was loaded again after it had been patched"
        elif code.__module__ == home and not hasattr(code, "__wrapped__"):
            return None
        file = getattr(getattr(code, "__code__", None), "co_filename", None)
        return (
            f"{code.__qualname__} is replaced by code of {code.__module__}"
            + f" in {file}" * bool(file)
        )


@dataclass(frozen=True)
class Use:
    """A model, as a program is about to use it.

    Parameters
    ----------
    model : mlx.nn.Module
        A model of any kind.
    caches : list
        The caches that it will be called with.
    max_kv_size : int, optional
        The window that was asked for.
    """

    model: nn.Module
    caches: list[Any]
    max_kv_size: int | None = None


@dataclass(frozen=True)
class Reach:
    """What a patch does for one model, in words: "4 sinks in …", "a budget …".

    Parameters
    ----------
    kept : str
        What it keeps, as a sentence goes on after "keeping".
    missed : str
        What was asked for and isn't done, as a sentence.
    """

    kept: str = ""
    missed: str = ""


class Patch:
    """What mends one upstream place that loses sinks.

    A subclass says what it replaces (``sites``), what a correct upstream does
    (``self_check``), what goes wrong (``faults``) and what it keeps, in words
    (``keeps``, and ``reach`` for one model). All the rest is here. While no policy is
    in force, our functions that are still there call upstream's.

    Parameters
    ----------
    target : Target
        The entry of ``targets.TARGETS`` that names this class.
    """

    def __init__(self, target: Target):
        self.target = target
        # Why the patch isn't installed though it was asked for.
        self.refused: str | None = None
        self._guarded: list[Site] = []
        self._policy: SinkPolicy | None = None
        # The policy of which users have been told.
        self._told: SinkPolicy | None = None
        self._mute()

    @property
    def policy(self) -> SinkPolicy | None:
        """What is asked for, for all models."""
        return self._policy

    @property
    def is_there(self) -> bool:
        """Whether upstream's calls reach the patch, where its module is imported."""
        module = sys.modules.get(self.target.module)
        return module is not None and self.is_on(module)

    def parts(self, model: nn.Module) -> list[nn.Module]:
        """What ``find`` finds, also where nothing is installed."""
        module = sys.modules.get(self.target.module)
        return [] if module is None else self.find(model, module)

    def sites(self, module: ModuleType) -> Iterable[Site]:
        """What is replaced, where, and by what."""
        raise NotImplementedError

    def self_check(self, module: ModuleType) -> str | None:
        """Where ours, nothing forced, differs from upstream; ``None`` if nowhere."""
        return None

    def faults(self, module: ModuleType) -> list[str]:
        """What goes wrong at this place now, found by running what is in force."""
        raise NotImplementedError

    def keeps(self, policy: SinkPolicy) -> str:
        """What a policy keeps at this place, in words."""
        raise NotImplementedError

    def wanted(self, policy: SinkPolicy) -> bool:
        """Whether a policy asks for what this patch does."""
        return True

    def mends(self, policy: SinkPolicy) -> bool:
        """Whether a policy gives this place anything to keep."""
        return self.wanted(policy)

    def find(self, model: nn.Module, module: ModuleType) -> list[nn.Module]:
        """The parts of a model that can have a policy of their own here."""
        return []

    def reach(self, use: Use, policy: SinkPolicy | None) -> Reach | None:
        """What is done for one model; ``None`` where there is nothing to do.

        The policy is that of all models, if there is one.
        """
        return None

    def runs_wrongly(self, module: ModuleType) -> bool:
        """Whether upstream by itself doesn't do what this patch is for."""
        try:
            with _trial():
                return bool(self.faults(module))
        except Exception:  # code that nobody here has seen
            return True

    def guards(self, module: ModuleType, refuse: Callable[[], None]) -> list[Site]:
        """What calls ``refuse`` where the patch can't be installed; by default all.

        It should stand where a model or cache that would run wrongly is built or first
        called, and let any other pass.
        """
        return [
            Site(site.holder, site.name, lambda *_, **__: refuse())
            for site in self._known(module)
            if not isinstance(site.ours, type)
        ]

    def out_of_reach(self, module: ModuleType) -> str | None:
        """Why nothing in this process would be reached, with what to do instead."""
        return None

    def policy_for(self, *arguments: Any) -> SinkPolicy | None:
        """The policy for one call; ``None`` where upstream's function is called."""
        return self._policy

    def say(self) -> None:
        """Say what is kept, unless a model's line has said it. It is said once."""
        if self._told != self._policy:
            self._told = self._policy
            self._say()

    def announce(self, say: Callable[[], None], tell: Callable[..., None]) -> None:
        """Take the functions that tell users what is kept: anywhere, and in a model."""
        self._say, self._tell = say, tell

    def tell(
        self, model: Any, caches: list[Any], max_kv_size: int | None = None
    ) -> None:
        """Tell users what applies to a model, which is about to use these caches."""
        self._tell(model, caches, max_kv_size)

    def was_told(self) -> None:
        """A model's line has said what is kept."""
        self._told = self._policy

    def _mute(self) -> None:
        self.announce(lambda: None, lambda *_: None)

    def is_on(self, module: ModuleType) -> bool:
        """Whether upstream's calls reach this patch: a reload may have undone it."""
        sites = [] if self._guarded else self._known(module)
        return bool(sites) and all(site.leads_to_ours for site in sites)

    def refusal(self, module: ModuleType) -> str | None:
        """Why an upstream can't be patched; ``None`` where it can."""
        if self.stands_guard:
            return self.refused
        try:
            strange = (
                site.strange(module.__name__)
                for site in self.sites(module)
                if _mark_of(site.found) is None  # else a link can lead to ours
            )
            with _trial():
                return next(filter(None, strange), None) or self.self_check(module)
        except Exception as error:
            # Python adds a guess to what a module lacks that is being imported.
            reason = str(error).partition(" (most likely due to a circular")[0]
            return f"its self-check failed with {type(error).__name__}: {reason}"

    def follow(self, policy: SinkPolicy | None) -> None:
        """Have functions that are in place, or come back, keep to another policy."""
        self._policy = policy

    def install(self, module: ModuleType, policy: SinkPolicy | None) -> None:
        """Install the patch; where it is installed already, change its policy."""
        self._unguard()
        self.follow(policy)
        for site in self.sites(module):
            site.lead(self._order, functools.partial(self._around, site.ours))

    def guard(
        self, module: ModuleType, reason: str, refuse: Callable[[], None]
    ) -> bool:
        """Have refused what would run wrongly; return whether that could be done."""
        if self.stands_guard:
            return True
        self._unguard()
        self.refused = reason
        if not self.runs_wrongly(module):
            return True
        try:
            guards = self.guards(module, refuse)
        except (AttributeError, ImportError, KeyError):  # no place is there
            guards = []
        for site in guards:
            site.lead(self._order, functools.partial(_guarding, site.ours))
            self._guarded.append(site)
        return bool(self._guarded)

    @property
    def stands_guard(self) -> bool:
        """Whether calls that would run wrongly are refused."""
        return bool(self._guarded) and all(s.leads_to_ours for s in self._guarded)

    def _unguard(self) -> None:
        self.refused = None
        for site in self._guarded:
            site.restore()
        self._guarded.clear()

    def uninstall(self, module: ModuleType) -> None:
        """Put upstream's own code back; nothing to do is not an error."""
        self._unguard()
        # Somebody may have wrapped ours since. Then it stays, and calls upstream's.
        self.follow(None)
        self._told = None
        self._mute()
        for site in self._known(module):
            site.restore()

    def _known(self, module: ModuleType) -> list[Site]:
        """The sites; none where upstream lacks one of them and so can't be patched."""
        try:
            sites = list(self.sites(module))
            for site in sites:
                _ = site.found
        except (AttributeError, ImportError, KeyError):
            return []
        return sites

    @property
    def _order(self) -> int:
        """Patches come in the order of ``TARGETS``, and what is no target last."""
        names = [*TARGETS, self.target.name]
        return names.index(self.target.name)

    def _around(self, ours: Callable, upstream: Callable, *arguments, **named):
        policy = self.policy_for(*arguments)
        if policy is None:
            return upstream(*arguments, **named)
        return ours(policy, upstream, *arguments, **named)


def _guarding(refuse: Callable, upstream: Callable, *arguments, **named):
    """Upstream's function, with a look at the arguments before it."""
    refuse(*arguments, **named)
    return upstream(*arguments, **named)


def by_name(
    function: Callable, arguments: tuple[Any, ...], named: dict[str, Any]
) -> dict[str, Any]:
    """A call's arguments, however they were given, and the defaults of the others."""
    bound = inspect.signature(function).bind_partial(*arguments, **named)
    bound.apply_defaults()
    rest = [
        p.name for p in bound.signature.parameters.values() if p.kind is p.VAR_KEYWORD
    ]
    others = {name: each for key in rest for name, each in bound.arguments[key].items()}
    return {**bound.arguments, **others}


def present(module: ModuleType, names: Iterable[str], ours: Callable) -> list[Site]:
    """The sites of methods, named as ``Class.method``, that a module has."""
    found = []
    for holder, _, name in (each.partition(".") for each in names):
        kind = getattr(module, holder, None)
        if name in getattr(kind, "__dict__", {}):
            found.append(Site(kind, name, ours))
    return found


def everywhere(module: ModuleType, name: str, ours: Callable) -> Iterator[Site]:
    """The sites of a function: its own module, and all that imported it by name."""
    home = Site(module, name, ours, module.__name__)
    yield home
    # Where somebody's wrapper of ours was left, it isn't the wrapper that others have.
    upstream = upstream_of(home.found)
    for holder in list(sys.modules.values()):
        if holder is not module and name in getattr(holder, "__dict__", {}):
            site = Site(holder, name, ours, module.__name__)
            if site.upstream is upstream:
                yield site


@contextmanager
def _trial() -> Iterator[None]:
    token = trying.set(True)
    try:
        yield
    finally:
        trying.reset(token)


def empty_cache(module: ModuleType, left_padding: tuple[int, ...] | None) -> Any:
    """Upstream's cache of one layer: of a sequence, or of a left-padded batch."""
    cache = module.KVCache()
    if left_padding is not None:
        cache = cache.merge([module.KVCache() for _ in left_padding])
        cache.prepare(left_padding=list(left_padding))
    return cache


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Seed MLX for a ``with`` block, and restore the caller's random state after it."""
    high, low = mx.random.state[0].tolist()
    mx.random.seed(0)
    try:
        yield
    finally:
        mx.random.seed(high << 32 | low)
