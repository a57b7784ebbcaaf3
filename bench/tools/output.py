"""What a script shows and writes: a table or JSON, a file of each, a picture, bars."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Output:
    """Where a script's result goes: the options of ``add_output``.

    Parameters
    ----------
    script : str
        Its name, which is that of the files too.
    json : bool
        Whether to print JSON in place of the table.
    out : Path, optional
        Folder for the files.
    """

    script: str
    json: bool
    out: Path | None

    def report(
        self,
        measure: Callable[[], dict],
        show: Callable[[dict, Console], None],
        draw: Callable[[dict, Any], None] | None = None,
        stopped: str = "stopped",
    ) -> int:
        """Measure, put the result out, and return the exit status."""
        name = f"{self.script}.py"
        return run(name, lambda: self.put(measure(), show, draw), stopped)

    def put(
        self,
        result: dict,
        show: Callable[[dict, Console], None],
        draw: Callable[[dict, Any], None] | None = None,
    ) -> None:
        """Print the result, and write it; ``draw`` fills a matplotlib figure."""
        if self.json:
            print(as_json(result))
        else:
            console = Console()
            if not console.is_terminal:
                console.width = 120  # a file has no edge that tables must fit in
            show(result, console)
        if self.out is None:
            return
        write_json(self.out / f"{self.script}.json", result)
        if draw is None:
            return
        try:
            from matplotlib.figure import Figure
        except ImportError:
            sentence = "no picture without matplotlib: pip install '.[plots]'"
            print(f"{self.script}.py: {sentence}", file=sys.stderr)
            return
        figure = Figure(layout="constrained")
        draw(result, figure)
        figure.savefig(self.out / f"{self.script}.png", dpi=120)


def run(script: str, work: Callable[[], None], stopped: str = "stopped") -> int:
    """The exit status of a script: what a user can mend is a sentence on stderr."""
    try:
        work()
    except (OSError, ValueError, RuntimeError) as error:
        print(f"{script}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{script}: {stopped}", file=sys.stderr)
        return 130
    return 0


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
