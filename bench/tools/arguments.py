"""What the scripts' command lines have in common."""

from __future__ import annotations

import argparse
from math import inf
from pathlib import Path

import mlx_sinks


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


def whole(text: str) -> int:
    """A number of things, none included."""
    if text.isascii() and text.isdigit() and int(text) < 2**31:
        return int(text)
    raise argparse.ArgumentTypeError(f"a whole number >= 0, not {text}")


def positive(text: str) -> float:
    """A finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < inf:
        raise argparse.ArgumentTypeError(f"a number above 0, not {text}")
    return number


def folder(text: str) -> Path:
    """A folder that is there, or was made: known before hours of work, not after."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from None
    return path


def add_model(parser: argparse.ArgumentParser) -> None:
    """Which model to load, of any kind."""
    parser.add_argument("--model", required=True, help="folder or hub id")


def add_policy(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--sinks", type=int, default=mlx_sinks.SinkPolicy.sinks, help="to keep")
    add("--recency", type=int, help="to keep; default: 128, at most half of index_topk")


def add_reading(parser: argparse.ArgumentParser, tokens: int, window: int) -> None:
    """What to read, past which window."""
    add = parser.add_argument
    add("--text", type=Path, help="default: Python's own manual")
    add("--tokens", type=count, default=tokens, help="how many to read")
    add("--skip", type=whole, default=0, help="tokens of the text to leave out first")
    add("--window", type=count, default=window, help="tokens kept, sinks included")
    add("--sinks", type=int, default=4, help="tokens kept for good")
