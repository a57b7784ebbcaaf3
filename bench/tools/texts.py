"""Texts as a model takes them: their tokens, written by it, and predicted by it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

import mlx_sinks
from mlx_sinks.measuring.text import MANUAL, text_ids
from tools.internals import by_layer, skill


def token_ids(tokenizer: Any, text: Path | None) -> tuple[list[int], dict[str, str]]:
    """All tokens of a text file, or of Python's manual, and what names them."""
    ids = text_ids(tokenizer, text)
    return ids, {"text": text.name if text else MANUAL, "sha256": sha256(ids)}


def tokens_to_read(
    tokenizer: Any, text: Path | None, tokens: int, skip: int
) -> tuple[list[int], dict[str, Any]]:
    """The tokens that the options of ``add_reading`` ask for, and what names them."""
    ids, source = token_ids(tokenizer, text)
    ids = ids[skip : skip + tokens]
    if len(ids) < tokens:
        raise ValueError(
            f"{source['text']} has {len(ids)} tokens after {skip}, not {tokens}"
        )
    return ids, {**source, "tokens": tokens, "skip": skip, "sha256": sha256(ids)}


def sha256(ids: list[int]) -> str:
    """Of the token ids in decimal, a blank between them."""
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()


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


def token_losses(
    model: nn.Module,
    ids: list[int],
    chunk: int = 128,
    step: Callable[[float], object] = lambda percent: None,
) -> np.ndarray:
    """The same of one text, shape (T - 1,)."""
    return batch_losses(model, [ids], chunk, step)[0]


def logits(
    model: nn.Module,
    ids: list[int],
    size: int,
    step: Callable[[int], object] = lambda tokens: None,
) -> mx.array:
    """Of all tokens, (T, V), in steps of so many; ``step`` is given how many are read.

    All are held at once: 400 MB for 2,048 tokens of a vocabulary of 49,152.
    """
    cache, rows = make_prompt_cache(model), []
    for start in range(0, len(ids), size):
        part = ids[start : start + size]
        rows.append(model(mx.array(part)[None], cache=cache)[0].astype(mx.float32))
        mx.eval(rows, [c.state for c in cache])
        step(len(part))
    return mx.concatenate(rows)


def difference(ours: mx.array, theirs: mx.array) -> float:
    """The largest of a row's logits, over its largest logit, of all rows (T, V)."""
    largest = mx.abs(theirs).max(axis=-1)
    return (mx.abs(ours - theirs).max(axis=-1) / largest).max().item()


def perplexity(losses: np.ndarray | mx.array) -> float:
    with np.errstate(over="ignore"):
        return float(np.exp(np.float64(losses.mean().item())))


def perplexity_past(losses: np.ndarray, first: int) -> float:
    """Of the tokens that are predicted from a column >= ``first``."""
    return perplexity(losses[first:])


def probed(
    model: nn.Module, policy: mlx_sinks.SinkPolicy, read: Callable[[], np.ndarray]
) -> tuple[np.ndarray, dict]:
    """What ``read`` returns, and what the selections it makes keep and cover."""
    with mlx_sinks.probe(model, policy) as recording:
        losses = read()
    if not recording.queries:
        raise ValueError("no query was looked at: read more --tokens")
    means = by_layer(recording)
    names = ("sinks_kept", "recency_kept", "mass", "mass_guaranteed", "mass_best")
    return losses, {
        **{name: float(means[name].mean()) for name in names},
        "skill": float(skill(means).mean()),
        "skill_by_layer": skill(means).round(4).tolist(),
        "mass_by_layer": means["mass"].round(4).tolist(),
    }
