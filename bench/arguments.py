"""What the scripts' command lines and files have in common."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from math import inf, isfinite
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub import snapshot_download
from rich.console import Console

import mlx_sinks
from mlx_sinks.measuring.text import MANUAL, text_ids

TEXT = Path(__file__).parent / "smollm2" / "text.txt"


class HelpFormatter(
    argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter
):
    """The script's docstring as it is written, and the defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str:
        if action.default in (None, False) or isinstance(action.default, list):
            return action.help
        return super()._get_help_string(action)


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


def new_file(text: str) -> Path:
    """A file that can be written, known before hours of work and not after them."""
    path = Path(text)
    _make(path.parent)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder")
    return path


def folder(text: str) -> Path:
    """A folder that is there, or was made."""
    path = Path(text)
    _make(path)
    return path


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from None


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, no table")
    parser.add_argument("--out", type=new_file, help="write the JSON to this file too")


def add_policy(parser: argparse.ArgumentParser) -> None:
    defaults = mlx_sinks.SinkPolicy()
    for name in ("sinks", "recency"):
        default = getattr(defaults, name)
        parser.add_argument(f"--{name}", type=int, default=default, help="to keep")


def add_reading(parser: argparse.ArgumentParser, tokens: int, window: int) -> None:
    """What to read, past which window."""
    add = parser.add_argument
    add("--text", type=Path, help="default: Python's own manual")
    add("--tokens", type=count, default=tokens, help="how many to read")
    add("--skip", type=whole, default=0, help="tokens of the text to leave out first")
    add("--window", type=count, default=window, help="tokens kept, sinks included")
    add("--sinks", type=int, default=4, help="tokens kept for good")


def tokens_to_read(
    tokenizer: Any, options: argparse.Namespace
) -> tuple[list[int], dict[str, Any]]:
    """The tokens that the options of ``add_reading`` ask for, and what names them."""
    ids, source = token_ids(tokenizer, options.text)
    ids = ids[options.skip : options.skip + options.tokens]
    if len(ids) < options.tokens:
        raise ValueError(
            f"{source['text']} has {len(ids)} tokens after {options.skip}, not "
            f"{options.tokens}"
        )
    facts = {"tokens": options.tokens, "skip": options.skip, "sha256": sha256(ids)}
    return ids, {**source, **facts}


def put_out(
    result: dict, options: argparse.Namespace, show: Callable[[dict, Console], None]
) -> None:
    """Print the result as asked, and write it where asked."""
    if options.json:
        print(as_json(result))
    else:
        console = Console()
        if not console.is_terminal:
            console.width = 120  # a file has no edge that tables must fit in
        show(result, console)
    if options.out:
        write_json(options.out, result)


def write_json(path: Path, result: Any) -> None:
    """The whole file or none of it, also where two runs write the same one."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        unfinished.write_text(as_json(result) + "\n")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def new_figure(script: str, **look: Any) -> Any | None:
    """A matplotlib figure, or ``None`` and a sentence where matplotlib isn't there."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        sentence = "no picture without matplotlib: pip install '.[plots]'"
        print(f"{script}: {sentence}", file=sys.stderr)
        return None
    return Figure(layout="constrained", **look)


def as_json(result: Any) -> str:
    """JSON proper, which has no NaN and no infinity: they are ``null``."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(part) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(part) for part in value]
        return None if isinstance(value, float) and not isfinite(value) else value

    return json.dumps(plain(result), indent=2, allow_nan=False)


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


def finished(
    path: Path | None, facts: dict[str, Any], compute: Callable[[], dict]
) -> dict:
    """The result of an earlier run with the same facts, or a new one that is kept."""
    if path is not None and path.exists():
        # Whatever else lies there under that name is replaced.
        with suppress(ValueError, TypeError, KeyError):
            kept = json.loads(path.read_text())
            if kept["facts"] == facts:
                return kept["result"]
    result = compute()
    if path is not None:
        write_json(path, {"facts": facts, "result": result})
    return result


def model_files(model: str) -> dict[str, Any]:
    """What tells whether a loaded model is still that of an earlier run.

    Its own small files by their content, weights by size and date.
    """
    path = Path(model)
    if not path.is_dir():
        path = Path(snapshot_download(model, local_files_only=True))
    facts: dict[str, Any] = {}
    for file in sorted(path.iterdir()):
        if file.suffix == ".safetensors":
            facts[file.name] = [file.stat().st_size, file.stat().st_mtime_ns]
        elif file.suffix in (".json", ".py", ".jinja"):
            facts[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return facts


def token_ids(tokenizer: Any, text: Path | None) -> tuple[list[int], dict[str, str]]:
    """All tokens of a text file, or of Python's manual, and what names them."""
    ids = text_ids(tokenizer, text)
    return ids, {"text": text.name if text else MANUAL, "sha256": sha256(ids)}


def sha256(ids: list[int]) -> str:
    """Of the token ids in decimal, a blank between them."""
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()


def environment() -> dict[str, Any]:
    """What a figure may depend on besides its command."""
    names = ("mlx-sinks", "mlx-lm", "mlx", "numpy")
    return {
        "versions": {name: version(name) for name in names},
        "python": platform.python_version(),
        "device": f"{mx.default_device()}, {platform.platform()}",
    }
