"""mlx-lm's attention kernel, and copies of model code that call another function."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

KERNEL = "scaled_dot_product_attention"


def calls_kernel(function: Any) -> bool:
    """Whether a function calls mlx-lm's kernel by its name."""
    return (
        isinstance(function, types.FunctionType)
        and KERNEL in function.__code__.co_names
        and KERNEL in function.__globals__
    )


def with_kernel(function: types.FunctionType, kernel: Callable) -> types.FunctionType:
    """A copy of a function, for which ``calls_kernel`` holds, that calls ``kernel``.

    Neither the function nor its module is touched.
    """
    copied = types.FunctionType(
        function.__code__,
        {**function.__globals__, KERNEL: kernel},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(copied, function)
