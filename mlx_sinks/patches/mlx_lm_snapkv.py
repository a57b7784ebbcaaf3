"""Target ``snapkv``: prompts compacted to a budget, in mlx-lm's own generation.

Upstream file: ``mlx_lm/generate.py``. A view of the model reads each prompt, and its
caches keep the last queries. The caches are compacted before the first new token; in
the server each request is compacted on its own. All needs a policy's ``kv_budget``.
"""

from __future__ import annotations

import copy
import inspect
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx

from ..budgets.compact_cache import BatchCompactCache, CompactCache
from ..budgets.compaction import (
    compact,
    compacting,
    counted,
    make_compactable,
    observing,
    out_of_budget,
    to_read_again,
    warn_of_skipped,
)
from ..budgets.observation import observed
from ..budgets.snapkv import SnapKV
from ..policy import PolicyError, Settings, SinkPolicy, command_with
from ..targets import Target
from ..upstream.caches import prompt_caches
from ..variable import VARIABLE
from ..windows.sink_cache import SinkCache
from .patch import Patch, Reach, Site, Use, everywhere

UNQUANTISED = "a compacted cache can't be quantised: leave out kv_bits or kv_budget"


class SnapKVPatch(Patch):
    """Compacts what mlx-lm has read of a prompt before it generates.

    The keys of an answer were computed beside a compacted prompt. A server that went on
    from them would answer otherwise than one that reads the whole prompt, and each of
    its answers would depend on those before. So its store holds whole prompts alone.
    """

    def __init__(self, target: Target):
        super().__init__(target)
        # What a server's thread fetched last, until it generates.
        self._fetched = threading.local()

    def sites(self, module: ModuleType) -> Iterator[Site]:
        """Functions that read prompts, alone and in batches, and that store them.

        Upstream's store would keep a compacted prompt like any other.
        """
        for name in ("generate_step", "speculative_generate_step"):
            yield from everywhere(module, name, getattr(self, f"_{name}"))
        yield Site(module, "_extend_cache", self._extend_cache)
        batch = module.PromptProcessingBatch
        for name in ("__init__", "prompt", "generate"):
            yield Site(batch, name, getattr(self, f"_batch_{name.strip('_')}"))
        store = sys.modules["mlx_lm.models.cache"].LRUPromptCache
        for name in ("insert_cache", "fetch_nearest_cache"):
            yield Site(store, name, getattr(self, f"_{name}"))

    def wanted(self, policy: SinkPolicy) -> bool:
        return policy.kv_budget is not None

    def keeps(self, policy: SinkPolicy) -> str:
        if policy.kv_budget is None:
            return "prompts whole, without a kv_budget,"
        return f"{policy.sinks} sinks of prompts compacted to {policy.kv_budget:,} rows"

    def out_of_reach(self, module: ModuleType) -> str | None:
        if _is_server_with_kv_bits(sys.orig_argv):
            whole = command_with(Settings.from_env().without(["snapkv"]).value())
            return f"{UNQUANTISED}, or keep prompts whole: {whole}"
        # Python has set sys.argv to ["-m"] while it looks for the module to run.
        name, words = module.__name__, sys.orig_argv
        found = [n for n, word in enumerate(words) if word in (name, f"-m{name}")]
        if sys.argv[:1] != ["-m"] or not found:
            return None
        command = [name, *words[found[0] + 1 :]]
        return (
            f"python -m {name} runs a copy of it that a budget doesn't reach: use "
            f"{command_with(Settings.from_env().value(), command)}"
        )

    def runs_wrongly(self, module: ModuleType) -> bool:
        """Always: no upstream has a budget of its own."""
        return True

    def reach(self, use: Use, policy: SinkPolicy | None) -> Reach | None:
        if policy is None:
            return None
        whole = out_of_budget(use.model, use.caches)
        reached, total = len(use.caches) - len(whole), len(use.caches)
        if not reached:
            missed = f"the budget of {policy.kv_budget:,} rows has no effect"
            return Reach(missed=f"{missed} ({counted(whole)})")
        kept = f"{self.keeps(policy)}, in {reached} of {total} layers"
        missed = f"the budget leaves the others whole ({counted(whole)})"
        return Reach(kept, missed * bool(whole))

    def self_check(self, module: ModuleType) -> str | None:
        for function, names in _ARGUMENTS.items():
            holder, _, name = function.rpartition(".")
            holder = getattr(module, holder) if holder else module
            found = inspect.signature(_upstream(holder, name)).parameters
            if missing := [each for each in names if each not in found]:
                return f"{function} doesn't take {', '.join(missing)}"
        read = _Steps()
        prompt = mx.arange(5)
        steps = _upstream(module, "generate_step")(
            prompt, read, max_tokens=1, prefill_step_size=3, prompt_cache=[]
        )
        next(steps)
        if read.steps[:3] != [3, 1, 1]:
            return f"a prompt of 5 tokens is read in steps of {read.steps}"
        return None

    def faults(self, module: ModuleType) -> list[str]:
        """Faults of a fork's own SnapKV, which ours doesn't replace."""
        keep = getattr(sys.modules["mlx_lm.models.cache"], "snapkv_keep_indices", None)
        if keep is None:
            return []
        rows, budget, sinks = 300, 16, 4  # so tight that sinks are capped
        kept = set(keep(rows, budget, [1e9] * rows, sink_tokens=sinks))
        kept &= set(range(sinks))
        fault = f"keeps {len(kept)} of {sinks} sinks in a budget of {budget} rows"
        return [fault] * (len(kept) < sinks)

    def _generate_step(self, policy, upstream, prompt, model, *arguments, **named):
        _refuse_to_quantise(named)
        caches = prompt_caches(named, model)
        store = self._store_of(prompt, caches)
        model = self._compacting(policy, model, caches, prompt, named, store)
        return upstream(prompt, model, *arguments, **named)

    def _speculative_generate_step(
        self, policy, upstream, prompt, model, draft_model, *arguments, **named
    ):
        _refuse_to_quantise(named)
        caches = prompt_caches(named, model, draft_model)
        store = self._store_of(prompt, caches)
        # The model's own come first, the draft model's after them, as in upstream. The
        # draft model reads first.
        own, drafts = caches[: len(model.layers)], caches[len(model.layers) :]
        model = self._compacting(policy, model, own, prompt, named, store)
        draft_model = self._compacting(
            policy, draft_model, drafts, prompt, named, store, ends=False
        )
        caches[:] = own + drafts
        return upstream(prompt, model, draft_model, *arguments, **named)

    def _compacting(self, policy, model, caches, prompt, named, store=None, ends=True):
        """The model, made to compact its caches before it reads the last token."""
        make_compactable(model, caches)
        method = _method(policy)

        def done(compacted):
            self._done(compacted, method)
            if store and ends and _are_compacted(compacted):
                store.put()

        embeddings = named.get("input_embeddings")
        tokens = len(prompt if embeddings is None else embeddings) - 1
        return compacting(model, method, tokens, store and store.take, done)

    def _done(self, caches: list[Any], method: SnapKV) -> None:
        self.say()
        warn_of_skipped(caches, method)

    def _store_of(self, prompt: mx.array, caches: list[Any]) -> _WholePrompt | None:
        """Where this prompt is stored, if it is the one that a server has fetched."""
        fetched, self._fetched.prompt = getattr(self._fetched, "prompt", None), None
        return fetched and fetched.if_of(prompt, caches)

    def _batch_init(
        self, policy, upstream, batch, model, uids, caches, *arguments, **named
    ):
        caches = [list(each) for each in caches]
        for each in caches:
            make_compactable(model, each)
        return upstream(batch, model, uids, caches, *arguments, **named)

    def _extend_cache(self, policy, upstream, caches, others):
        """Convert a plain batch, from before the budget, that meets a compact one."""
        plain = sys.modules["mlx_lm.models.cache"].BatchKVCache
        for pair in ((caches, others), (others, caches)):
            for layer, (one, other) in enumerate(zip(*pair)):
                if type(one) is plain and isinstance(other, BatchCompactCache):
                    pair[0][layer] = BatchCompactCache.of(one)
        return upstream(caches, others)

    def _batch_prompt(self, policy, upstream, batch, tokens):
        if not tokens:
            return upstream(batch, tokens)
        model, batch.model = batch.model, observed(batch.model)
        try:
            with observing(batch.prompt_cache, _method(policy).window_size):
                return upstream(batch, tokens)
        finally:
            batch.model = model

    def _batch_generate(self, policy, upstream, batch, tokens):
        if any(len(each) > 1 for each in tokens):
            batch.prompt([each[:-1] for each in tokens])
            tokens = [each[-1:] for each in tokens]
        compact(batch.prompt_cache, _method(policy))
        self._done(batch.prompt_cache, _method(policy))
        return upstream(batch, tokens)

    def _insert_cache(
        self, policy, upstream, store, model, tokens, prompt_cache, **named
    ):
        if _are_compacted(prompt_cache):
            return
        ours = [cache for cache in prompt_cache if isinstance(cache, CompactCache)]
        held = min((cache.offset for cache in ours), default=len(tokens))
        if held < len(tokens):  # upstream counts a draft's last token, which isn't read
            if len(ours) < len(prompt_cache):
                return
            for cache in ours:
                cache.trim(cache.offset - held)
        upstream(store, model, tokens[:held], prompt_cache, **named)

    def _fetch_nearest_cache(self, policy, upstream, store, model, tokens):
        """What is stored of a prompt, and its rest, which fills observation windows."""
        caches, rest = upstream(store, model, tokens)
        if again := to_read_again(caches or [], len(rest) - 1, _method(policy)):
            trim = sys.modules["mlx_lm.models.cache"].trim_prompt_cache
            if trim(caches, again):
                rest = tokens[len(tokens) - len(rest) - again :]
            else:  # a layer can't be trimmed
                caches, rest = None, tokens
        first = weakref.ref(caches[0]) if caches else None
        self._fetched.prompt = _WholePrompt(store, model, list(tokens), first)
        return caches, rest


@dataclass
class _WholePrompt:
    """The caches of a prompt that a server will store, while they are whole.

    Where requests are served alone, mlx-lm stores its caches after the answer only.

    Parameters
    ----------
    store : LRUPromptCache
        Upstream's store.
    model : object
        What it knows the model by.
    tokens : list of int
        The prompt.
    fetched : weakref.ref, optional
        The first of the caches that were fetched for its first tokens.
    """

    store: Any
    model: Any
    tokens: list[int]
    fetched: weakref.ref | None
    whole: tuple[Any, ...] = ()

    def if_of(self, prompt: mx.array, caches: list[Any]) -> _WholePrompt | None:
        """This, if a generation goes on from the caches with the prompt's rest."""
        if self.fetched is None:
            known = all(cache.empty() for cache in caches)
        else:
            known = self.fetched() is caches[0]
        is_rest = self.tokens[-prompt.size :] == prompt.tolist()
        return self if known and is_rest else None

    def take(self, caches: list[Any]) -> None:
        """Copy a model's caches; a draft model, whose caches come last, reads first."""
        self.whole = (*copy.deepcopy(caches), *self.whole)

    def put(self) -> None:
        """Store all but the last token, as upstream does in a batch.

        Not beside a draft model where layers have windows: while drafts are verified
        those hold more than they should keep.
        """
        if not any(isinstance(cache, SinkCache) for cache in self.whole):
            self.store.insert_cache(
                self.model, self.tokens[:-1], [*self.whole], cache_type="user"
            )


def _method(policy: SinkPolicy) -> SnapKV:
    return SnapKV(policy.kv_budget, sink_tokens=policy.sinks)


def _upstream(holder: Any, name: str) -> Any:
    return Site(holder, name, None).upstream


class _Steps:
    """A model that notes how many tokens each call brings."""

    def __init__(self):
        self.steps: list[int] = []

    def __call__(self, inputs, cache):
        self.steps.append(inputs.shape[1])
        return mx.zeros((*inputs.shape, 2))


# Arguments that our functions read, or pass to upstream's.
_ARGUMENTS = {
    "generate_step": ("prompt", "model", "prompt_cache", "input_embeddings"),
    "speculative_generate_step": ("prompt", "model", "draft_model", "prompt_cache"),
    "PromptProcessingBatch.__init__": ("model", "uids", "caches"),
    "PromptProcessingBatch.prompt": ("tokens",),
    "PromptProcessingBatch.generate": ("tokens",),
}


def _refuse_to_quantise(named: dict[str, Any]) -> None:
    if named.get("kv_bits") is not None:
        raise PolicyError(
            f'{UNQUANTISED} ({VARIABLE}="snapkv=0" goes back to whole caches)'
        )


def _is_server_with_kv_bits(words: list[str]) -> bool:
    """Whether a command starts mlx-lm's server with quantised caches.

    Its requests would all fail, and the server would stay up.
    """
    _, *rest = words or [""]
    while rest and rest[0].startswith("-") and rest[0][:2] not in ("-m", "-c"):
        rest = rest[1 + (rest[0] in ("-W", "-X")) :]  # Python's own options
    if rest[:1] == ["-m"]:
        del rest[0]
    elif rest and rest[0].startswith("-m"):
        rest[0] = rest[0][2:]
    program = [Path(word).name for word in rest[:1]]
    if program == ["mlx_lm"] and rest[1:2] == ["server"]:
        program, rest = ["mlx_lm.server"], rest[1:]
    options = (word.partition("=")[0] for word in rest[1:])
    return program == ["mlx_lm.server"] and any(
        "--kv-bits".startswith(option) and option > "--kv-" for option in options
    )


def _are_compacted(caches: list[Any]) -> bool:
    return any(isinstance(cache, CompactCache) and cache.dropped for cache in caches)
