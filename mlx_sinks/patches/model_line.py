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
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import mlx.nn as nn

from ..logger import inform, layers, warn
from ..policy import SinkPolicy
from ..sparse.selectors import selecting_layers
from ..targets import Target
from .patch import Patch, Site, Use, everywhere

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
        if hasattr(utils, "load_model"):
            yield from everywhere(utils, "load_model", self._load_model)
        for name in ("generate", "stream_generate"):
            if hasattr(generate, name):
                yield from everywhere(generate, name, self._generate)
        if hasattr(generate, "BatchGenerator"):
            yield Site(generate.BatchGenerator, "__init__", self._batch_generator)

    def follow_policy(self, policy: SinkPolicy | None) -> None:
        """Listen while anything is asked for."""
        if policy is None:
            self.uninstall(None)
        else:
            self.install(None, policy)

    def _load_model(self, policy, upstream, *arguments, **named):
        loaded = upstream(*arguments, **named)
        # All else depends on a window, which isn't known yet.
        if self._policy and self._out_of_reach(loaded[0]):
            self.tell(loaded[0], [])
        return loaded

    def _generate(self, policy, upstream, *arguments, **named):
        given = _by_name(upstream, arguments, named)
        size = given.get("max_kv_size")
        if given.get("draft_model") is not None:
            size = None  # upstream's speculation has no window
            self._before(given["draft_model"], None, None)
        self._before(given.get("model"), given.get("prompt_cache"), size)
        return upstream(*arguments, **named)

    def _batch_generator(self, policy, upstream, *arguments, **named):
        given = _by_name(upstream, arguments, named)
        self._before(given.get("model"), None, given.get("max_kv_size"))
        return upstream(*arguments, **named)

    def _before(
        self, model: Any, caches: list[Any] | None, max_kv_size: int | None
    ) -> None:
        if caches is None:
            make = sys.modules["mlx_lm.models.cache"].make_prompt_cache
            self.tell(model, make(model, max_kv_size), max_kv_size)
        else:  # a draft model's come after the model's own
            self.tell(model, caches[: len(_layers(model))])

    def tell(
        self, model: Any, caches: list[Any], max_kv_size: int | None = None
    ) -> None:
        if self._policy is None or not isinstance(model, nn.Module):
            return
        from ..upstream.caches import kinds  # imports mlx-lm

        facts = f"{[patch.policy for patch in self._patches()]} {kinds(caches)}"
        told, size = vars(model).get("sinks_told", (None, None))
        # A program that hands over caches doesn't say what it made them for.
        if told == facts and max_kv_size in (None, size):
            return
        vars(model)["sinks_told"] = facts, max_kv_size  # no parameter of the model
        try:
            self._tell_of(Use(model, caches, max_kv_size))
        except Exception as error:  # a model that nobody here has seen
            kind = type(model)
            warn(
                f"can't say what applies to {kind.__module__}.{kind.__qualname__} "
                f"({type(error).__name__}: {error})"
            )

    def _tell_of(self, use: Use) -> None:
        kept, missed, left = [], [], []
        for patch in self._patches():
            if patch.is_in_place:
                if reach := patch.reach(use, patch.policy):
                    kept.append(reach.kept)
                    missed.append(reach.missed)
                    patch.was_told()
            elif idle := patch.parts(use.model) if _is_left(patch) else []:
                why = "no fault" if patch.refused else f"{patch.target.name} is off"
                left.append(f"{layers(len(idle))} select as upstream does ({why})")
        missed += self._out_of_reach(use.model)
        keeping = " and ".join(filter(None, kept))
        clauses = [f"keeping {keeping}" if keeping else "", *missed, *left]
        sentence = "; ".join(filter(None, clauses)) or _nothing(use)
        say = warn if any(missed) else inform
        say(f"{_name(type(use.model))}: {sentence} ({self._releases()})")

    def _out_of_reach(self, model: nn.Module) -> list[str]:
        """A sentence for each class that selects keys without us."""
        known = {
            id(part)
            for patch in self._patches()
            if patch.is_in_place or _is_left(patch)
            for part in patch.parts(model)
        }
        kinds = Counter(
            type(part)
            for part in selecting_layers(model).values()
            if id(part) not in known
        )
        total = layers(len(_layers(model)))
        return [
            f"not reached: keys are selected in {count} of {total} by the "
            f"{kind.__name__} of {whose}, where no sinks are kept ({help})"
            for kind, count in kinds.items()
            for whose, help in [_whose(kind)]
        ]


def _by_name(
    function: Callable, arguments: tuple[Any, ...], named: dict[str, Any]
) -> dict[str, Any]:
    """A call's arguments, however they were given."""
    parameters = inspect.signature(function).parameters.values()
    names = (
        each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD
    )
    return {**dict(zip(names, arguments)), **named}


def _layers(model: nn.Module) -> list[nn.Module]:
    return getattr(model, "layers", None) or [model]


def _is_left(patch: Patch) -> bool:
    """Whether upstream's code runs because it was asked for, or has no fault."""
    return patch.policy is None or patch.refused is not None


def _name(kind: type) -> str:
    """A model's kind as mlx-lm calls it; any other by its class."""
    for base in kind.__mro__:
        if _is_upstreams(base):
            return base.__module__.rpartition(".")[2]
    return f"{kind.__module__}.{kind.__qualname__}"


def _nothing(use: Use) -> str:
    rotating = sys.modules["mlx_lm.models.cache"].RotatingKVCache
    windows = sum(isinstance(cache, rotating) for cache in use.caches)
    if use.max_kv_size is not None:
        own = "is mlx-lm's own" if windows else "is overlooked by mlx-lm here"
        return f"its window of {use.max_kv_size:,} tokens {own} (rotating is off)"
    if windows:
        own = layers(windows, "sliding ")
        return f"nothing to do: it selects no keys, and {own} stay as trained"
    return "nothing to do: it selects no keys and has no window"


def _whose(kind: type) -> tuple[str, str]:
    """Whose code a class is, and what helps."""
    name, file = kind.__module__, _file(kind)
    help = "mlx_lm.generate runs mlx-lm's own code, which is reached"
    if _is_upstreams(kind):
        return name, "mlx-sinks has no target for it"
    if name == _FOLDERS_OWN:
        help = "without model_file in config.json mlx-lm's own runs, which is reached"
        return f"the model folder's {file}", help
    if name.startswith("mlx_lm."):
        return f"{file}, which stands in the place of {name}", help
    return f"{name} in {file}", help


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
