"""Long texts of a fixed length, several side by side: written by a model, and read."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler


def generate(
    model: nn.Module,
    prompt: list[int],
    tokens: int,
    texts: int,
    *,
    temp: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    never: list[int] = (),
    step: Callable[[], object] = lambda: None,
) -> list[list[int]]:
    """``texts`` continuations of ``tokens`` tokens, decoded as one batch.

    Sampled with upstream's sampler; ``temp=0`` is greedy. ``never`` are tokens that are
    not picked: with the end-of-text tokens there, every text has the full length.
    """
    mx.random.seed(seed)
    sampler = make_sampler(temp=temp, top_p=top_p)
    cache = make_prompt_cache(model)
    inputs = mx.array([prompt] * texts)
    for start in range(0, len(prompt) - 1, 128):
        model(inputs[:, start : min(start + 128, len(prompt) - 1)], cache=cache)
        mx.eval([c.state for c in cache])
    last, drawn = inputs[:, -1:], []
    for _ in range(tokens):
        logits = model(last, cache=cache)[:, -1].astype(mx.float32)
        if never:
            logits[:, mx.array(never)] = -mx.inf
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        last = sampler(logprobs)[:, None]
        mx.eval(last, [c.state for c in cache])
        drawn.append(last)
        step()
    return np.array(mx.concatenate(drawn, axis=1)).tolist()


def text_losses(
    model: nn.Module, prompt: list[int], texts: list[list[int]]
) -> np.ndarray:
    """Negative log-likelihood in nats of each token of each text, (texts, tokens)."""
    losses = batch_losses(model, [prompt + text for text in texts], chunk=64)
    return losses[:, len(prompt) - 1 :]


def batch_losses(
    model: nn.Module,
    texts: list[list[int]],
    chunk: int,
    step: Callable[[float], object] = lambda percent: None,
    cache: list | None = None,
) -> np.ndarray:
    """Negative log-likelihood in nats of each token after the first, (texts, T - 1).

    Teacher-forced, the texts equally long. One chunk's logits are held at a time.
    ``step`` is given percents of the work; ``cache`` is by default the model's own.
    """
    cache = cache or make_prompt_cache(model)
    ids = mx.array(texts)
    total, losses = ids.shape[1] - 1, []
    for start, stop in pairwise([*range(0, total, chunk), total]):
        logits = model(ids[:, start:stop], cache=cache).astype(mx.float32)
        loss = nn.losses.cross_entropy(logits, ids[:, start + 1 : stop + 1])
        losses.append(np.array(loss))
        mx.eval([c.state for c in cache])
        step(100 * (stop - start) / total)
    return np.concatenate(losses, axis=1)
