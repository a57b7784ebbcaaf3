"""What the scripts' command lines have in common."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from rich.console import Console


class HelpFormatter(
    argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter
):
    """The script's docstring as it is written, and the defaults."""


def seed(text: str) -> int:
    """A seed as MLX's random numbers take it."""
    if text.isascii() and text.isdigit() and int(text) < 2**32:
        return int(text)
    raise argparse.ArgumentTypeError(f"a whole number from 0 to 2**32 - 1, not {text}")


def count(text: str) -> int:
    """A number of things of which one is needed at least."""
    if text.isascii() and text.isdigit() and 0 < int(text) < 2**31:
        return int(text)
    raise argparse.ArgumentTypeError(f"a whole number >= 1, not {text}")


def new_file(text: str) -> Path:
    """A file that can be written, known before hours of work and not after them."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from None
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder")
    return path


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, no table")
    parser.add_argument("--out", type=new_file, help="write the JSON to this file too")


def put_out(
    result: dict, options: argparse.Namespace, show: Callable[[dict, Console], None]
) -> None:
    """Print the result as asked, and write it where asked."""
    text = json.dumps(result, indent=2)
    if options.json:
        print(text)
    else:
        show(result, Console())
    if options.out:
        options.out.write_text(text + "\n")
