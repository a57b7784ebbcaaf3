"""The one line that users read of a model: what applies to it.

Upstream files: ``mlx_lm/utils.py`` and ``mlx_lm/generate.py``. The line goes by the
classes that run: a folder may bring code of its own, and a program may put its own in
the place of mlx-lm's.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import mlx.nn as nn

from ..logger import inform, layers, warn
from ..policy import PolicyError, SinkPolicy
from ..sparse.selectors import selecting_layers
from ..targets import Target
from .patch import Patch, PatchError, Site, Use, by_name, everywhere, present

# What mlx-lm calls the module of a folder's model_file.
_FOLDERS_OWN = "custom_model"


class ModelLine(Patch):
    """Says what applies to a model, once, before it generates.

    It changes nothing, so it is no target.

    Parameters
    ----------
    patches : callable
        Gives all patches whose file was imported.
    releases : callable
        Gives the releases that the line ends with.
    """

    def __init__(self, patches: Callable[[], list[Patch]], releases: Callable[[], str]):
        super().__init__(Target("line", "mlx-lm", "mlx_lm.utils", "", ""))
        self._patches, self._releases = patches, releases

    def sites(self, module: ModuleType | None = None) -> Iterator[Site]:
        """Upstream's functions that load a model, and that begin to generate."""
        utils, generate = map(sys.modules.get, ("mlx_lm.utils", "mlx_lm.generate"))
        for holder, name, ours in (
            (utils, "load_model", self._load_model),
            (generate, "generate", self._generate),
            (generate, "stream_generate", self._stream_generate),
        ):
            if hasattr(holder, name):
                yield from everywhere(holder, name, ours)
        yield from present(
            generate, ["BatchGenerator.insert_segments"], self._insert_segments
        )

    def follow_policy(self, policy: SinkPolicy | None) -> None:
        """Listen while anything is asked for."""
        if policy is None:
            self.uninstall(None)
        else:
            self.install(None, policy)

    def _load_model(self, policy, upstream, *arguments, **named):
        loaded = upstream(*arguments, **named)
        with self._harmless(loaded[0]):
            # All else depends on a window, which isn't known yet.
            if self._out_of_reach(loaded[0]):
                self.tell(loaded[0], [])
        return loaded

    def _generate(self, policy, upstream, *arguments, **named):
        self._before(by_name(upstream, arguments, named))
        return upstream(*arguments, **named)

    def _stream_generate(self, policy, upstream, *arguments, **named):
        """Nothing is said, made or refused before the first token is asked for."""
        self._before(by_name(upstream, arguments, named))
        yield from upstream(*arguments, **named)

    def _insert_segments(self, policy, upstream, *arguments, **named):
        given = by_name(upstream, arguments, named)
        generator, caches = given.get("self"), given.get("caches") or []
        facts = {
            "model": getattr(generator, "model", None),
            "prompt_cache": next((each for each in caches if each is not None), None),
            "max_kv_size": getattr(generator, "max_kv_size", None),
        }
        self._before(facts)
        return upstream(*arguments, **named)

    def _before(self, given: dict[str, Any]) -> None:
        """Tell what applies to the models of a call that is about to generate."""
        model, draft = given.get("model"), given.get("draft_model")
        caches, size = given.get("prompt_cache"), given.get("max_kv_size")
        with self._harmless(model):
            make = getattr(
                sys.modules["mlx_lm.models.cache"], "make_prompt_cache", _made
            )
            beside = None
            if size is not None and caches is not None:
                beside = "a prompt cache"
            elif size is not None and draft is not None and not self._is_on("rotating"):
                beside = "a draft model"
            made = None if beside else size
            if draft is not None and caches is None:
                self.tell(draft, make(draft, max_kv_size=made), made)
            if caches is None:
                caches = make(model, max_kv_size=made)
            else:  # a draft model's come after the model's own
                caches = caches[: len(_layers(model))]
            self.tell(model, caches, size, beside)

    @contextmanager
    def _harmless(self, model: Any) -> Iterator[None]:
        """A look that fails disturbs nobody; what is refused, the call refuses."""
        try:
            yield
        except (PolicyError, PatchError):
            pass
        except Exception as error:  # a model that nobody here has seen
            kind = type(model)
            warn(
                f"can't say what applies to {kind.__module__}.{kind.__qualname__} "
                f"({type(error).__name__}: {error})"
            )

    def tell(
        self,
        model: Any,
        caches: list[Any],
        max_kv_size: int | None = None,
        dropped_beside: str | None = None,
    ) -> None:
        """Say it, once for each policy, kinds of caches, and window asked for.

        Parameters
        ----------
        model : mlx.nn.Module
            Anything else is passed over.
        caches : list
            Those that it will be called with.
        max_kv_size : int, optional
            The window that was asked for.
        dropped_beside : str, optional
            Beside what upstream drops that window.
        """
        if self._policy is None or not isinstance(model, nn.Module):
            return
        with self._harmless(model):
            from ..upstream.caches import kinds  # imports mlx-lm

            facts = f"{[patch.policy for patch in self._patches()]} {kinds(caches)}"
            told = vars(model).setdefault("sinks_told", {})  # no parameter of the model
            sizes = told.setdefault(facts, [])
            # A program that hands over caches doesn't say what it made them for.
            if max_kv_size not in sizes and (max_kv_size is not None or not sizes):
                sizes.append(max_kv_size)
                dropped = dropped_beside and (
                    f"mlx-lm makes no window of {max_kv_size:,} tokens beside "
                    f"{dropped_beside}"
                )
                size = None if dropped else max_kv_size
                self._tell_of(Use(model, caches, size), dropped)

    def _tell_of(self, use: Use, dropped: str | None) -> None:
        kept, missed, left = [], [dropped], []
        for patch in self._patches():
            if patch.is_there and (reach := patch.reach(use, patch.policy)):
                kept.append(reach.kept)
                missed.append(reach.missed)
                patch.was_told()
            idle = [part for part in patch.parts(use.model) if _is_left(patch, part)]
            if idle:
                why = "no fault" if patch.refused else f"{patch.target.name} is off"
                left.append(f"{layers(len(idle))} select as upstream does ({why})")
        if not self._is_on("rotating"):
            left.append(_upstreams_window(use))
        if self._policy.kv_budget is not None and not self._is_on("snapkv"):
            left.append("prompts stay whole (snapkv is off)")
        missed += self._out_of_reach(use.model)
        keeping = " and ".join(filter(None, kept))
        clauses = [f"keeping {keeping}" if keeping else "", *missed, *left]
        sentence = "; ".join(filter(None, clauses)) or _nothing(use)
        say = warn if any(missed) else inform
        say(f"{_name(type(use.model))}: {sentence} ({self._releases()})")

    def _is_on(self, target: str) -> bool:
        return any(p.is_there for p in self._patches() if p.target.name == target)

    def _out_of_reach(self, model: nn.Module) -> list[str]:
        """A sentence for each class that selects keys without us."""
        known = {
            id(part)
            for patch in self._patches()
            for part in patch.parts(model)
            if _is_left(patch, part) or (patch.is_there and patch.policy_for(part))
        }
        kinds = Counter(
            type(part)
            for part in selecting_layers(model).values()
            if id(part) not in known
        )
        total = layers(len(_layers(model)))
        return [
            f"not reached: {_whose(kind)[0]} selects the keys in {count} of {total}, "
            f"and keeps no sinks; {_whose(kind)[1]}"
            for kind, count in kinds.items()
        ]


def _layers(model: nn.Module) -> list[nn.Module]:
    return getattr(model, "layers", None) or [model]


def _is_left(patch: Patch, part: nn.Module) -> bool:
    """Whether upstream's code runs because it was asked for, or has no fault."""
    if patch.refused:
        return not patch.stands_guard
    return patch.policy_for(part) is None


def _name(kind: type) -> str:
    """A model's kind as mlx-lm calls it; any other by its class."""
    if kind.__module__ == _FOLDERS_OWN:
        return "the folder's own model"
    for base in kind.__mro__:
        if base.__module__.startswith("mlx_lm."):
            return base.__module__.rpartition(".")[2]
    return f"{kind.__module__}.{kind.__qualname__}"


def _made(model: nn.Module, max_kv_size: int | None = None) -> list[Any]:
    """What a release without ``make_prompt_cache`` may call a model with."""
    from ..upstream.caches import fresh_caches

    return fresh_caches(model)


def _windows(caches: list[Any]) -> int:
    """How many caches have a window, by what such caches have in common."""
    from ..upstream.caches import flat

    sizes = ("max_size", "chunk_size", "sliding_window")
    return sum(any(getattr(c, size, None) for size in sizes) for c in flat(caches))


def _own_windows(model: nn.Module) -> int:
    """How many of a model's layers were trained with a window."""
    from ..upstream.caches import fresh_caches

    return _windows(fresh_caches(model))


def _upstreams_window(use: Use) -> str:
    """What becomes of a window without our patch; nothing where there is none."""
    if _windows(use.caches) > _own_windows(use.model):
        return "its window is mlx-lm's own (rotating is off)"
    if use.max_kv_size is None:
        return ""
    size = f"{use.max_kv_size:,} tokens"
    return f"its window of {size} is overlooked by mlx-lm here (rotating is off)"


def _nothing(use: Use) -> str:
    windows, own = _windows(use.caches), _own_windows(use.model)
    if windows > own:
        return "it selects no keys, and its window keeps no sinks (sinks is 0)"
    if own:
        trained = layers(own, "sliding ")
        return f"nothing to do: it selects no keys, and leaves {trained} as trained"
    return "nothing to do: it selects no keys and has no window"


def _whose(kind: type) -> tuple[str, str]:
    """Whose code selects, and what helps."""
    name, file = kind.__module__, _file(kind)
    if _is_upstreams(kind):
        return f"{name}.{kind.__name__}", "mlx-sinks has no target for it"
    if name == _FOLDERS_OWN:
        help = "to be reached, take model_file out of its config.json"
        return f"the model folder's code ({file})", help
    place = f", put in the place of {name}," * name.startswith("mlx_lm.")
    whose = f"{file}{place}" if place else f"{name} ({file})"
    return whose, "to be reached, run it with mlx_lm.generate"


def _is_upstreams(kind: type) -> bool:
    """Whether a class is mlx-lm's, by its code and not by its name."""
    if not kind.__module__.startswith("mlx_lm."):
        return False
    home = Path(sys.modules["mlx_lm"].__file__).parent
    return home in Path(_file(kind)).parents


def _file(kind: type) -> str:
    """The file of a class's code; the module that it names may be another's."""
    functions = (f for f in vars(kind).values() if isinstance(f, FunctionType))
    files = (inspect.unwrap(f).__code__.co_filename for f in functions)
    return next(files, "an unknown file")
