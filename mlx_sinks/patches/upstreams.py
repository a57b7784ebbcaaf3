"""What patches have to know of the code that they replace."""

from __future__ import annotations

from collections.abc import Callable


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
