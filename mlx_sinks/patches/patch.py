"""What patches have to know of the code that they replace."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..policy import SinkPolicy


class PatchError(RuntimeError):
    """An upstream that can't be patched; it is left as it was."""


def replaced_by_others(function: Callable, module: str) -> str | None:
    """Whose code stands in a function's place, if it isn't its own module's."""
    if function.__module__ == module and not hasattr(function, "__wrapped__"):
        return None
    code = getattr(function, "__code__", None)
    place = f" in {code.co_filename}" if code else ""
    return (
        f"{function.__qualname__} is replaced by code of {function.__module__}{place}"
    )


class FunctionsPatch:
    """A patch that replaces functions of upstream's modules and classes.

    While no policy is in force the functions in place pass through to upstream's.
    """

    module: str

    def __init__(self):
        self._policy: SinkPolicy | None = None
        self._say: Callable[[], None] = lambda: None

    def _sites(self, module: ModuleType) -> Iterator[tuple[Any, str, Callable]]:
        """What is replaced: its holder, its name, and ours, which gets it first."""
        raise NotImplementedError

    def wanted(self, policy: SinkPolicy) -> bool:
        return True

    def find(self, model: nn.Module, module: ModuleType) -> list[nn.Module]:
        return []

    def announce(self, say: Callable[[], None]) -> None:
        self._say = say  # when one of the functions has something to do

    def is_on(self, module: ModuleType) -> bool:
        # A wrapper made with functools.wraps has our mark too, and calls us.
        functions = [
            _function_of(holder, name) for holder, name, _ in self._known(module)
        ]
        return bool(functions) and all(hasattr(f, "sinks_upstream") for f in functions)

    def install(
        self, module: ModuleType, version: str, policy: SinkPolicy | None
    ) -> None:
        self._policy = policy
        for holder, name, ours in self._sites(module):
            function = _function_of(holder, name)
            if not hasattr(function, "sinks_upstream"):
                _put(holder, name, self._instead_of(function, ours))

    def uninstall(self, module: ModuleType) -> None:
        # Somebody may have wrapped ours since: then it stays, passing through.
        self._policy = None
        for holder, name, _ in self._known(module):
            if upstream := _upstream_of(_function_of(holder, name)):
                _put(holder, name, upstream)

    def _known(self, module: ModuleType) -> list[tuple[Any, str, Callable]]:
        """The sites of an upstream that has them all; nothing is in force elsewhere."""
        try:
            return list(self._sites(module))
        except AttributeError:
            return []

    def _replaced_by_others(self, module: ModuleType) -> str | None:
        """Whose code stands in the place of one of the functions."""
        for holder, name, _ in self._sites(module):
            function = self._upstream(holder, name)
            home = getattr(holder, "__module__", module.__name__)
            if reason := replaced_by_others(function, home):
                return reason
        return None

    @staticmethod
    def _upstream(holder: Any, name: str) -> Callable:
        """A function as upstream has it, whether ours stands in its place or not."""
        function = _function_of(holder, name)
        return _upstream_of(function) or function

    def _instead_of(self, upstream: Callable, ours: Callable) -> Callable:
        @functools.wraps(upstream)
        def function(*arguments, **named):
            if self._policy is None:
                return upstream(*arguments, **named)
            return ours(upstream, *arguments, **named)

        function.sinks_upstream = function, upstream
        return function


def _function_of(holder: Any, name: str) -> Callable:
    """A function of a module or class; a class method's own."""
    value = vars(holder)[name]
    return getattr(value, "__func__", value)


def _put(holder: Any, name: str, function: Callable) -> None:
    is_bound = isinstance(vars(holder)[name], classmethod)
    setattr(holder, name, classmethod(function) if is_bound else function)


def _upstream_of(function: Callable) -> Callable | None:
    """What one of ours replaces; ``None`` for any other, a wrapper of ours included."""
    ours, upstream = getattr(function, "sinks_upstream", (None, None))
    return upstream if ours is function else None


@contextmanager
def random_state_kept() -> Iterator[None]:
    """A small seeded model inside, the caller's random numbers untouched outside."""
    high, low = mx.random.state[0].tolist()
    mx.random.seed(0)
    try:
        yield
    finally:
        mx.random.seed(high << 32 | low)
