"""An optimised BLAS for mlx's CPU wheel on Linux, where the system has one."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys


def with_fast_blas(environment: dict[str, str]) -> dict[str, str]:
    """The environment with OpenBLAS preloaded, or as it was where there is none.

    mlx's Linux wheel links a reference BLAS that is some hundred times slower in
    matrix products. Debian and Ubuntu: ``apt install libopenblas0-pthread``.
    """
    library = ctypes.util.find_library("openblas") if sys.platform == "linux" else None
    if library is None or "LD_PRELOAD" in environment:
        return environment
    try:
        ctypes.CDLL(library)
    except OSError:
        return environment
    return {**environment, "LD_PRELOAD": library}


def restart_with_fast_blas() -> None:
    """Begin this script again with OpenBLAS preloaded, where that changes anything."""
    environment = with_fast_blas(dict(os.environ))
    if environment != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
