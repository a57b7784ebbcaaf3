"""The text to measure a model with."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any

from transformers.utils import logging

MANUAL = "Python's manual"


def text_ids(tokenizer: Any, file: Path | None = None) -> list[int]:
    """All token ids of a plain or gzipped text file, or of Python's own manual.

    Every Python has half a million characters of English in ``pydoc_data``; their
    length and wording depend on its release.

    Raises
    ------
    OSError, ValueError
        No such file, no text in it, or a Python without its manual.
    """
    if file is None:
        written = _manual()
    else:
        content = file.read_bytes()
        try:
            packed = file.suffix == ".gz"
            written = (gzip.decompress(content) if packed else content).decode()
        except (EOFError, UnicodeDecodeError, zlib.error) as error:
            raise ValueError(f"{file} is no text: {error}") from None
    # Models read it in parts: a warning that it exceeds the context would mislead.
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        return tokenizer.encode(written)
    finally:
        logging.set_verbosity(verbosity)


def _manual() -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise FileNotFoundError("this Python has no pydoc_data: give a text") from None
    return "\n\n".join(topics.values())
