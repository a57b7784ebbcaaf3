"""What scripts show and write: tables, bars, JSON, and what a figure depends on."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Any

import mlx.core as mx
from rich.console import Console
from rich.progress import Progress, ProgressColumn
from rich.table import Table

WORDS = ("arm", "model", "measure", "indexers", "mlx-sinks", "patched")


def new_table(title: str, *headings: str, caption: str | None = None) -> Table:
    """A table whose figures stand to the right and whose words stand to the left."""
    table = Table(title=title, caption=caption)
    for heading in headings:
        justify = "left" if heading in WORDS else "right"
        table.add_column(heading, justify=justify)
    return table


def bars(*columns: ProgressColumn, transient: bool = True) -> Progress:
    """Progress bars on stderr, which leave stdout to the result."""
    return Progress(*columns, console=Console(stderr=True), transient=transient)


def new_bar(progress: Progress, title: str, total: float = 100) -> Callable[..., None]:
    """A function that moves a bar of its own, by one or by what it is given."""
    return partial(progress.advance, progress.add_task(title, total=total))


def write_json(path: Path, result: Any) -> None:
    """The whole file or none of it, also where two runs write the same one."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        unfinished.write_text(as_json(result) + "\n")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def as_json(result: Any) -> str:
    """JSON proper, which has no NaN and no infinity: they are ``null``."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(part) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(part) for part in value]
        return None if isinstance(value, float) and not isfinite(value) else value

    return json.dumps(plain(result), indent=2, allow_nan=False)


def environment() -> dict[str, Any]:
    """What a figure may depend on besides its command."""
    names = ("mlx-sinks", "mlx-lm", "mlx", "numpy")
    return {
        "versions": {name: version(name) for name in names},
        "python": platform.python_version(),
        "device": f"{mx.default_device()}, {platform.platform()}",
    }
