"""A script from its command line to its exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from tools.arguments import folder
from tools.output import as_json, write_json


class HelpFormatter(
    argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter
):
    """The script's docstring as it is written, and the defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str:
        if action.default in (None, False) or isinstance(action.default, list):
            return action.help
        return super()._get_help_string(action)


class Script(argparse.ArgumentParser):
    """A script's command line, and the way its result goes.

    The help is the script's docstring. ``--json`` prints JSON in place of the table,
    ``--out`` is a folder that gets JSON and, where there is one, the picture: files of
    the script's name. ``also`` says what else is written there.
    """

    def __init__(self, description: str, also: str = ""):
        super().__init__(description=description, formatter_class=HelpFormatter)
        self.json, self.out = False, None
        self.add_argument(
            "--json", action="store_true", help="print JSON instead of a table"
        )
        what = f"folder for {self.name}.json{also}"
        self.add_argument("--out", type=folder, help=what)

    @property
    def name(self) -> str:
        return Path(self.prog).stem

    def parse_args(self, *given: Any) -> argparse.Namespace:
        options = super().parse_args(*given)
        self.json, self.out = options.json, options.out
        return options

    def report(
        self,
        measure: Callable[[], dict],
        show: Callable[[dict, Console], None],
        draw: Callable[[dict, Any], None] | None = None,
        stopped: str = "stopped",
    ) -> int:
        """Measure, put the result out, and return the exit status."""
        return run(self.prog, lambda: self.put(measure(), show, draw), stopped)

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
        write_json(self.out / f"{self.name}.json", result)
        if draw is None:
            return
        try:
            from matplotlib.figure import Figure
        except ImportError:
            sentence = "no picture without matplotlib: pip install '.[plots]'"
            print(f"{self.prog}: {sentence}", file=sys.stderr)
            return
        figure = Figure(layout="constrained")
        draw(result, figure)
        figure.savefig(self.out / f"{self.name}.png", dpi=120)


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
