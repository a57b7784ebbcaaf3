"""The base of all patches: it replaces upstream's code, and puts it back."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from packaging.specifiers import SpecifierSet

from ..policy import SinkPolicy
from ..targets import Target


class PatchError(RuntimeError):
    """An upstream that can't be patched; it is left as it was."""


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
    """

    holder: Any
    name: str
    ours: Callable | type

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
        ours, upstream = getattr(self.found, "sinks_upstream", (None, None))
        return upstream if ours is self.found else None

    @property
    def leads_to_ours(self) -> bool:
        """Whether calls reach ours; a wrapper or subclass of it has its mark."""
        return hasattr(self.found, "sinks_upstream")

    def put(self, value: Any) -> None:
        """Put a function or class there."""
        bound = isinstance(vars(self.holder)[self.name], classmethod)
        setattr(self.holder, self.name, classmethod(value) if bound else value)

    def strange(self, module: str) -> str | None:
        """Whose code is there, if it is neither ours nor upstream's."""
        code, home = self.upstream, getattr(self.holder, "__module__", module)
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


class Patch:
    """What mends one upstream place that loses sinks.

    A subclass says what it replaces (``sites``), what a correct upstream does
    (``self_check``), what goes wrong (``faults``) and what it keeps, in words
    (``keeps``). All the rest is here. While no policy is in force, our functions that
    are still there call upstream's.

    Parameters
    ----------
    target : Target
        The entry of ``targets.TARGETS`` that names this class.
    """

    # True: say what is kept at installation. False: when it first matters.
    says_at_once = False

    def __init__(self, target: Target):
        self.target = target
        # The release of the package, once ``refusal`` has looked it up.
        self.version: str | None = None
        self._policy: SinkPolicy | None = None
        self._say: Callable[[], None] = lambda: None

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

    def policy_for(self, *arguments: Any) -> SinkPolicy | None:
        """The policy for one call; ``None`` where upstream's function is called."""
        return self._policy

    def say(self) -> None:
        """Say what is kept; it is said once."""
        self._say()

    def announce(self, say: Callable[[], None]) -> None:
        """Take the function that tells users what is kept."""
        self._say = say
        if self.says_at_once:
            say()

    def is_on(self, module: ModuleType) -> bool:
        """Whether upstream's calls reach this patch: a reload may have undone it."""
        sites = self._known(module)
        return bool(sites) and all(site.leads_to_ours for site in sites)

    def unsupported(self) -> str | None:
        """Why the installed release's number is unsupported; ``None`` if it isn't."""
        package, version = self.target.package, self.target.version()
        if not self.target.installed:
            return f"{package} isn't installed"
        if version is None:
            return f"{package} has no metadata: install it with pip"
        if not SpecifierSet(self.target.tested).contains(version, prereleases=True):
            return f"only {package} {self.target.tested} is supported"
        return None

    def refusal(self, module: ModuleType) -> str | None:
        """Why an upstream can't be patched; ``None`` where it can."""
        if reason := self.unsupported():
            return reason
        self.version = self.target.version()
        try:
            strange = (
                site.strange(module.__name__)
                for site in self.sites(module)
                if not site.leads_to_ours  # a wrapper around ours that was left
            )
            return next(filter(None, strange), None) or self.self_check(module)
        except Exception as error:
            return f"its self-check failed with {type(error).__name__}: {error}"

    def follow(self, policy: SinkPolicy | None) -> None:
        """Have functions that are in place, or come back, keep to another policy."""
        self._policy = policy

    def install(self, module: ModuleType, policy: SinkPolicy | None) -> None:
        """Install the patch; where it is installed already, change its policy."""
        self.follow(policy)
        for site in self.sites(module):
            if not site.leads_to_ours:
                site.put(self._instead_of(site.found, site.ours))

    def uninstall(self, module: ModuleType) -> None:
        """Put upstream's own code back; nothing to do is not an error."""
        # Somebody may have wrapped ours since. Then it stays, and calls upstream's.
        self.follow(None)
        self._say = lambda: None
        for site in self._known(module):
            if upstream := site.replaced:
                site.put(upstream)

    def _known(self, module: ModuleType) -> list[Site]:
        """The sites; none where upstream lacks one of them and so can't be patched."""
        try:
            sites = list(self.sites(module))
            for site in sites:
                _ = site.found
        except (AttributeError, KeyError):
            return []
        return sites

    def _instead_of(self, upstream: Any, ours: Any) -> Any:
        if isinstance(ours, type):
            ours.sinks_upstream = ours, upstream
            return ours

        @functools.wraps(upstream)
        def function(*arguments, **named):
            policy = self.policy_for(*arguments)
            if policy is None:
                return upstream(*arguments, **named)
            return ours(policy, upstream, *arguments, **named)

        function.sinks_upstream = function, upstream
        return function


def everywhere(module: ModuleType, name: str, ours: Callable) -> Iterator[Site]:
    """The sites of a function: its own module, and all that imported it by name."""
    home = Site(module, name, ours)
    yield home
    # Where somebody's wrapper of ours was left, it isn't the wrapper that others have.
    _, upstream = getattr(home.found, "sinks_upstream", (None, home.found))
    for holder in list(sys.modules.values()):
        if holder is not module and name in getattr(holder, "__dict__", {}):
            site = Site(holder, name, ours)
            if site.upstream is upstream:
                yield site


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Seed MLX for a ``with`` block, and restore the caller's random state after it."""
    high, low = mx.random.state[0].tolist()
    mx.random.seed(0)
    try:
        yield
    finally:
        mx.random.seed(high << 32 | low)
