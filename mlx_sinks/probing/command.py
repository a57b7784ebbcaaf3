"""``mlx-sinks probe``: a text through a model, and what its indexers keep."""

from __future__ import annotations

import argparse
import json
import sys

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from ..measuring.text import MANUAL, text_ids
from ..patches.registry import versions
from ..policy import SinkPolicy
from ..upstream.loading import load_model
from .recorder import Recording, probe
from .report import as_dict, draw, show


def run(options: argparse.Namespace, policy: SinkPolicy) -> int:
    """Probe as the options ask, print, and write; the exit status."""
    errors = Console(stderr=True)
    seen, tokens = observe(options, policy, errors)
    result = {
        "model": options.model,
        "text": options.text.name if options.text else MANUAL,
        "tokens": tokens,
        "versions": versions(),
        "device": str(mx.default_device()),
        **as_dict(seen),
    }
    written = json.dumps(result, indent=2) + "\n"
    if options.out:
        (options.out / "probe.json").write_text(written)
        try:
            draw(seen, options.out / "probe.png", f"{options.model}, {seen.policy}")
        except ImportError:
            errors.print(
                "mlx-sinks: no matplotlib, so no picture: "
                "pip install 'mlx-sinks[plots]'",
                markup=False,
            )
    if options.json:
        sys.stdout.write(written)
    else:
        show(seen, Console(), options.worst)
    return 0


def observe(
    options: argparse.Namespace, policy: SinkPolicy, errors: Console
) -> tuple[Recording, int]:
    """Load the options' model and read their text; what was seen of how many tokens."""
    with errors.status(f"Loading {escape(options.model)} …"):
        model, tokenizer = load_model(options.model, options.trust_remote_code)
    all_ids = text_ids(tokenizer, options.text)
    with probe(model, policy, block=options.block, queries=options.queries) as seen:
        wanted = options.tokens or 2 * seen.index_topk
        ids = all_ids[:wanted]
        if len(ids) < wanted:
            raise ValueError(f"the text has {len(ids)} tokens, not {wanted}")
        if wanted <= seen.index_topk:
            raise ValueError(
                f"{wanted} tokens don't go past the model's index_topk "
                f"{seen.index_topk}: nothing would be selected"
            )
        cache = make_prompt_cache(model)
        with Progress(console=errors, transient=True) as progress:
            task = progress.add_task("Probing", total=wanted)
            for start in range(0, wanted, options.chunk):
                tokens = mx.array(ids[start : start + options.chunk])[None]
                mx.eval(model(tokens, cache))
                progress.advance(task, tokens.size)
    if not seen.queries:
        raise ValueError(
            f"no query was looked at between index_topk {seen.index_topk} and token "
            f"{wanted}: ask for more --tokens or --queries"
        )
    return seen, wanted
