"""Target ``dsa``: the learned top-k of DeepSeek Sparse Attention in mlx-lm.

Upstream file: ``mlx_lm/models/deepseek_v32.py``. ``glm_moe_dsa`` builds on the same
``Indexer`` class, so both kinds of model are reached.
"""

from __future__ import annotations

import functools
from collections import Counter
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..logger import layers
from ..policy import PolicyError, SinkPolicy
from ..sparse.columns import forced_columns
from ..sparse.indexer import Dialect, indexer_forward
from ..sparse.selection import is_watched
from .patch import (
    Patch,
    Reach,
    Site,
    Use,
    empty_cache,
    present,
    random_state_kept,
)

# Upstream's own selection: nothing is forced, and scores are computed as upstream does.
UPSTREAM = SinkPolicy(0, 0, scoring="upstream")


class DSAPatch(Patch):
    """Replaces ``Indexer.__call__`` by the forward that keeps sinks and recency."""

    # Set by the self-check.
    dialect: Dialect

    def sites(self, module: ModuleType) -> list[Site]:
        return [Site(module.Indexer, "__call__", self._forward)]

    def _forward(self, policy, upstream, indexer, x, qr, mask, cache=None):
        if policy is self._policy:  # not a model's own
            self.say()
        return indexer_forward(
            indexer, x, qr, mask, cache, policy=policy, dialect=self.dialect
        )

    def guards(self, module: ModuleType, refuse) -> list[Site]:
        """A model is refused before its weights are read, one that is there later."""
        names = ("Model.__init__", "Indexer.__call__")
        return present(module, names, lambda *_, **__: refuse())

    def policy_for(self, indexer: nn.Module, *_: Any) -> SinkPolicy | None:
        policy = getattr(indexer, "sink_policy", None) or self._policy
        if policy is None and is_watched():
            return UPSTREAM  # by our code, which shows the watcher its selection
        return policy

    def keeps(self, policy: SinkPolicy) -> str:
        return str(policy)

    def mends(self, policy: SinkPolicy) -> bool:
        return policy.sinks > 0

    def reach(self, use: Use, policy: SinkPolicy | None) -> Reach | None:
        kept, missed = Counter(), ""
        for indexer in self.parts(use.model):
            own = self.policy_for(indexer)
            if own is None:
                continue
            try:
                fit = own.fit(indexer.index_topk)
                kept[f"{fit} among the {indexer.index_topk:,} keys selected"] += 1
            except PolicyError as error:
                missed = str(error)
        total = layers(len(getattr(use.model, "layers", None) or [None]))
        words = (f"{each} in {count} of {total}" for each, count in kept.items())
        return Reach(", ".join(words), missed) if kept or missed else None

    def find(self, model: nn.Module, module: ModuleType) -> list[nn.Module]:
        return [part for part in model.modules() if _calls_upstream(part, module)]

    def self_check(self, module: ModuleType) -> str | None:
        with random_state_kept():
            indexer = _small_indexer(module)
        theirs = functools.partial(self.sites(module)[0].upstream, indexer)
        expected = {
            case: _selections(module, theirs, *calls) for case, calls in _CASES.items()
        }
        differing = []
        for dialect in _DIALECTS:
            ours = functools.partial(
                indexer_forward, indexer, policy=UPSTREAM, dialect=dialect
            )
            for case, calls in _CASES.items():
                if not _same(_selections(module, ours, *calls), expected[case]):
                    differing.append(case)
                    break
            else:
                self.dialect = dialect
                return None
        last = max(differing, key=[*_CASES].index)  # of the dialect that is nearest
        return f"the patched Indexer differs from upstream's {last}"

    def faults(self, module: ModuleType) -> list[str]:
        policy, lost, made = SinkPolicy(2, 2), 0, 0
        with random_state_kept():
            indexer = _small_indexer(module)
        indexer.sink_policy = policy  # it fits here; the policy in force may not
        for left_padding, steps in _CASES.values():
            first = None if left_padding is None else mx.array(left_padding)
            *selections, _, _ = _selections(module, indexer, left_padding, steps)
            for selected in selections:
                forced = forced_columns(policy, *selected.shape[2:], first)
                lost += (forced & ~selected).any(axis=-1).sum().item()
                made += selected[..., 0].size
        if not lost:
            return []
        return [f"{lost} of {made} selections leave out a first or newest token"]


def _calls_upstream(part: nn.Module, module: ModuleType) -> bool:
    if not isinstance(part, module.Indexer):
        return False
    # A class that adds to upstream's forward has to say so.
    extends = getattr(part, "extends_upstream", False)
    return extends or type(part).__call__ is module.Indexer.__call__


def _append_keys_031(cache: Any, keys: mx.array) -> mx.array:
    no_values = mx.zeros((*keys.shape[:-1], 0))
    return cache.update_and_fetch(keys, no_values)[0]


def _append_keys_032(cache: Any, keys: mx.array) -> mx.array:
    keys, _ = cache.update_and_fetch(keys, keys)
    # Nobody reads the values. Unevaluated, their graph would grow with each step.
    cache.values = mx.zeros_like(cache.keys)
    return keys


def _sum_heads_at_once(scores: mx.array) -> mx.array:
    return scores.sum(axis=1, keepdims=True)


def _sum_heads_032(scores: mx.array) -> mx.array:
    if scores.shape[2] == 1:
        return _sum_heads_at_once(scores)
    return sum(mx.split(scores, scores.shape[1], axis=1))


# Of mlx-lm 0.32 and of 0.31. A fork's is found by trying, whatever it calls itself.
_DIALECTS = (
    Dialect(_append_keys_032, _sum_heads_032),
    Dialect(_append_keys_031, _sum_heads_at_once),
)

# How the self-check calls the indexer: left padding by sequence, tokens by call.
_CASES = {
    "in prefill": (None, (12,)),
    "in decode": (None, (9, 1, 1, 3)),
    "in a left-padded batch": ((4, 0), (9, 1, 1, 3)),
}


def _small_indexer(module: ModuleType) -> nn.Module:
    args = module.ModelArgs(
        hidden_size=32,
        index_n_heads=4,
        index_head_dim=16,
        index_topk=6,
        q_lora_rank=24,
        qk_rope_head_dim=8,
    )
    return module.Indexer(args)


def _selections(module: ModuleType, forward, left_padding, steps) -> list[mx.array]:
    """What each step selects of what it sees, and what the cache holds at the end."""
    cache = empty_cache(module, left_padding)
    B = len(left_padding or (0,))
    results = []
    for step, L in enumerate(steps):
        x = mx.random.normal((B, L, 32), key=mx.random.key(2 * step))
        qr = mx.random.normal((B, L, 24), key=mx.random.key(2 * step + 1))
        mask = module.create_attention_mask(x, cache, return_array=True)
        columns = forward(x, qr, mask, cache)
        T = sum(steps[: step + 1])
        selected = mx.put_along_axis(
            mx.zeros((B, 1, L, T), mx.bool_), columns, mx.array(True), axis=-1
        )
        results.append(selected if mask is None else selected & mask)
    return [*results, cache.keys, cache.values]


def _same(ours: list[mx.array], upstreams: list[mx.array]) -> bool:
    return all(
        a.shape == b.shape and mx.allclose(a, b).item() for a, b in zip(ours, upstreams)
    )
