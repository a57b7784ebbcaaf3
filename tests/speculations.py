"""Random speculative generations with a window, each beside plain decoding.

``python tests/speculations.py --runs 1000`` prints how many tokens differ.
"""

import argparse
import functools
import importlib
import random
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import RotatingKVCache

import mlx_sinks
import small_models

# By its module: the package has a function of that name.
generate = importlib.import_module("mlx_lm.generate")


@functools.cache
def model(seed):
    return small_models.make_llama(seed=seed, num_hidden_layers=2)


@dataclass(frozen=True)
class Case:
    """One generation: ``seed`` is of its prompt, ``draft`` of its draft model."""

    window: int
    sinks: int
    prompt: int
    drafts: int
    new: int
    step: int
    rotating: bool
    draft: int
    seed: int = 0

    @classmethod
    def drawn(cls, draw, seed=0):
        """``draw`` gives a whole number between two."""
        window = draw(2, 40)
        return cls(
            window=window,
            sinks=draw(0, min(5, window - 1)),
            prompt=draw(1, 60),
            drafts=draw(0, 6),
            new=draw(1, 60),
            step=(1, 3, 7, 512)[draw(0, 3)],
            rotating=bool(draw(0, 1)),
            draft=draw(0, 2),
            seed=seed,
        )

    def caches(self, model):
        if self.rotating:
            made = RotatingKVCache(max_size=self.window, keep=self.sinks)
            return [made, RotatingKVCache(max_size=self.window, keep=self.sinks)]
        return mlx_sinks.make_sink_cache(model, self.window, sinks=self.sinks)

    def tokens(self):
        return small_models.tokens(self.seed, self.prompt)

    @property
    def options(self):
        return {"max_tokens": self.new, "prefill_step_size": self.step}

    def plainly(self):
        """The tokens of plain decoding."""
        caches = self.caches(model(0))
        steps = generate.generate_step(
            mx.array(self.tokens()), model(0), prompt_cache=caches, **self.options
        )
        return [int(token) for token, _ in steps]

    def with_drafts(self):
        """The tokens, how many were the draft's, and the caches of both models."""
        caches = self.caches(model(0)) + self.caches(model(self.draft))
        steps = generate.speculative_generate_step(
            mx.array(self.tokens()),
            model(0),
            model(self.draft),
            num_draft_tokens=self.drafts,
            prompt_cache=caches,
            **self.options,
        )
        tokens, accepted = [], 0
        for token, _, is_draft in steps:
            tokens.append(int(token))
            accepted += is_draft
        return tokens, accepted, caches

    def is_a_tie(self, read):
        """Whether the next token's lead is within what other cuts change in it."""
        rows = [
            small_models.logits(
                model(0),
                read,
                [cut] * (len(read) // cut) + [len(read) % cut] * 1,
                self.caches(model(0)),
            )[-1]
            for cut in (1, len(read))
        ]
        noise = np.abs(rows[0] - rows[1]).max()
        second, first = np.sort(rows[0])[-2:]
        return first - second <= noise


def differs(case):
    """Whether a token differs from plain decoding's and is no tie; and the drafts."""
    plain, (ours, accepted, _) = case.plainly(), case.with_drafts()
    assert len(ours) == len(plain)
    for n, (one, other) in enumerate(zip(plain, ours)):
        if one != other:
            return not case.is_a_tie(case.tokens() + plain[:n]), accepted
    return False, accepted


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    mlx_sinks.install(targets=["rotating"])
    differing = accepted = new = 0
    for run in range(options.runs):
        draw = random.Random(f"{options.seed} {run}").randint
        case = Case.drawn(draw, run)
        wrong, drafts = differs(case)
        if wrong:
            print(f"differs: {case}")
        differing, accepted, new = differing + wrong, accepted + drafts, new + case.new
    print(
        f"{differing} of {options.runs} runs differ from plain decoding; "
        f"{accepted} of {new} tokens were drafts"
    )
    return int(differing > 0)


if __name__ == "__main__":
    raise SystemExit(main())
