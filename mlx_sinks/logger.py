"""What mlx-sinks says while a program runs: the logger ``mlx_sinks``.

A program that configures ``logging`` gets our records as it gets all others. Where none
is configured they are lines on standard error.
"""

from __future__ import annotations

import functools
import logging
import os
import sys

from .variable import OFF, QUIET_VARIABLE

logger = logging.getLogger("mlx_sinks")


def inform(sentence: str) -> None:
    """Say what is kept, unless ``MLX_SINKS_QUIET`` is set."""
    if os.environ.get(QUIET_VARIABLE, "").strip().lower() in OFF:
        said(logging.INFO, sentence)


def warn(sentence: str) -> None:
    """Say what a user should know of."""
    said(logging.WARNING, sentence)


def layers(count: int, of: str = "") -> str:
    """A number of layers, in words."""
    return f"{count} {of}layer" + "s" * (count != 1)


@functools.lru_cache(maxsize=1024)
def said(level: int, sentence: str) -> None:
    """Say it, once: a loop should not fill the terminal."""
    line = f"mlx-sinks: {sentence}"
    if logger.hasHandlers():
        logger.log(level, line)
    elif level >= logger.level:
        print(line, file=sys.stderr, flush=True)
