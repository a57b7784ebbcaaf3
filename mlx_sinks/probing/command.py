"""``mlx-sinks probe``: a text through a model, and what its indexers keep."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TimeElapsedColumn

from ..measuring.text import MANUAL, text_ids
from ..patches.registry import versions
from ..policy import SinkPolicy
from ..upstream.hub import read_json
from ..upstream.loading import load_model
from .picture import draw_written
from .reading import Reading
from .recorder import probe
from .recording import Recording
from .report import as_dict, show


def run(
    reading: Reading, policy: SinkPolicy, *, worst: int, as_json: bool, out: Path | None
) -> int:
    """Probe, print JSON or the worst layers, write to a folder; return the status."""
    errors = Console(stderr=True)
    draws = out is not None and _can_draw(errors)
    seen, tokens = record(reading, policy, errors)
    result = {
        "model": reading.model,
        "text": reading.text.name if reading.text else MANUAL,
        "tokens": tokens,
        "versions": versions(),
        "device": str(mx.default_device()),
        **as_dict(seen),
    }
    written = json.dumps(result, indent=2) + "\n"
    if as_json:
        sys.stdout.write(written)
    else:
        show(seen, Console(), worst)
    if out:
        (out / "probe.json").write_text(written)
        names = ["probe.json"]
        if draws:
            picture = seen.plot(f"{reading.model}, {seen.policy}")
            picture.savefig(out / "probe.png", dpi=120)
            names.append("probe.png")
        _say(errors, f"wrote {' and '.join(names)} to {out}")
    return 0


def plot(file: Path) -> int:
    """Draw a ``probe.json`` again, beside it; return the status.

    Raises
    ------
    OSError, ValueError
        It can't be read, or is none.
    """
    errors = Console(stderr=True)
    if not _can_draw(errors):
        return 1
    try:
        picture = draw_written(read_json(file))
    except ValueError as error:
        raise ValueError(f"can't draw {file}: {error}") from None
    picture.savefig(file.with_suffix(".png"), dpi=120)
    _say(errors, f"wrote {file.with_suffix('.png')}")
    return 0


def _can_draw(errors: Console) -> bool:
    if find_spec("matplotlib") is None:
        _say(errors, "no picture without matplotlib: pip install 'mlx-sinks[plots]'")
        return False
    return True


def _say(errors: Console, sentence: str) -> None:
    errors.print(f"mlx-sinks: {sentence}", markup=False, soft_wrap=True)


def record(
    reading: Reading, policy: SinkPolicy, errors: Console
) -> tuple[Recording, int]:
    """Load the model and read the text; return the recording and the tokens read."""
    if not errors.is_terminal:
        _say(errors, f"loading {reading.model}")
    with errors.status(f"Loading {escape(reading.model)} …"):
        model, tokenizer = load_model(reading.model, reading.trust_remote_code)
    all_ids = text_ids(tokenizer, reading.text)
    with probe(model, policy, block=reading.block, queries=reading.queries) as seen:
        wanted = reading.tokens or 2 * seen.index_topk
        ids = all_ids[:wanted]
        if len(ids) < wanted:
            raise ValueError(f"the text has {len(ids)} tokens, not {wanted}")
        if wanted <= seen.index_topk:
            raise ValueError(
                f"{wanted} tokens don't go past the model's index_topk "
                f"{seen.index_topk}: nothing would be selected"
            )
        cache = make_prompt_cache(model)
        # A step may take minutes: the default estimate forgets one that old.
        longest = 24 * 3600
        with Progress(
            *Progress.get_default_columns(),
            TimeElapsedColumn(),
            console=errors,
            transient=True,
            speed_estimate_period=longest,
        ) as progress:
            task = progress.add_task("Probing", total=wanted)
            for start in range(0, wanted, reading.chunk):
                tokens = mx.array(ids[start : start + reading.chunk])[None]
                mx.eval(model(tokens, cache))
                progress.advance(task, tokens.size)
    if not seen.queries:
        raise ValueError(
            f"no query was looked at between index_topk {seen.index_topk} and token "
            f"{wanted}: ask for more --tokens or --queries"
        )
    return seen, wanted
