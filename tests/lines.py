"""What the logger says, where a test listens."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from mlx_sinks import logger


class Ear(logging.Handler):
    def __init__(self, level: int):
        super().__init__(level)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def heard(level: int = logging.WARNING) -> Iterator[list[str]]:
    """The lines of a ``with`` block, also those that were said before it."""
    logger.said.cache_clear()
    ear, before = Ear(level), logger.logger.level
    logger.logger.addHandler(ear)
    logger.logger.setLevel(level)
    try:
        yield ear.lines
    finally:
        logger.logger.removeHandler(ear)
        logger.logger.setLevel(before)
