"""What to keep: the attention sinks and the recency window.

``SinkPolicy`` says what to keep. ``Settings`` holds all that ``MLX_SINKS`` says.
"""

from __future__ import annotations

import difflib
import functools
import operator
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from .logger import warn
from .targets import TARGETS
from .variable import OFF, VARIABLE

ACCEPTED = (
    f"{VARIABLE}=1, {VARIABLE}=0 or "
    f'{VARIABLE}="sinks=8,recency=128,kv_budget=1024,rotating=0"'
)
# How an indexer's scores are computed; the first is the default.
SCORINGS = ("blocks", "upstream")
# The default recency: docs/causes.md has the sweep behind it.
RECENCY = 128
_ON = frozenset({"1", "on", "true", "yes"})
_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{unit}": base ** (power + 1)
    for unit, base in (("b", 1000), ("ib", 1024))
    for power, prefix in enumerate("kmgt")
}


class PolicyError(ValueError):
    """An impossible policy. The message names the argument or the variable."""


@dataclass(frozen=True)
class SinkPolicy:
    """Columns that every selection keeps, and how the others are scored.

    Source: Xiao et al. 2023, "Efficient Streaming Language Models with Attention
    Sinks" (StreamingLLM): softmax parks its surplus weight on the first tokens.

    Parameters
    ----------
    sinks : int, default=4
        Number of columns kept, counted from each sequence's first real token. The
        default is the paper's. It must be below the model's ``index_topk``.
    recency : int, optional
        Number of newest columns kept, the query's own included; by default 128, but at
        most half of the model's ``index_topk``.
    scoring : {"blocks", "upstream"}, default="blocks"
        How a learned indexer's scores are computed. ``"blocks"`` takes a block of
        queries at a time and sums heads in float32. ``"upstream"`` takes all queries at
        once, with upstream's own arithmetic: it alone selects what upstream selects
        near the threshold, bit for bit. See ``docs/performance.md``.
    score_memory : int, optional
        Bytes that a block of queries may take while it is scored and selected from, and
        while it attends to the selected columns. The default is 32 MiB on a CPU, and on
        a GPU 1/64 of its memory, from 32 MiB to 1 GiB. A block has at least one query.
    sparse_from : int, optional
        Keys from which on steps of several tokens attend to the selected columns alone,
        and not before. By default that is chosen by what it costs, see
        ``docs/performance.md``.
    kv_budget : int, optional
        Rows that each key-value head keeps of a prompt once it is read, ``sinks`` among
        them. By default no prompt is compacted. See ``SnapKV``.

    Raises
    ------
    PolicyError
        A ``ValueError``: a count is too small or not a whole number, or the scoring is
        unknown.
    """

    sinks: int = 4
    recency: int | None = None
    scoring: str = SCORINGS[0]
    score_memory: int | None = None
    sparse_from: int | None = None
    kv_budget: int | None = None

    def __post_init__(self):
        object.__setattr__(self, "sinks", whole_number("sinks", self.sinks))
        for name, least, of in (
            ("recency", 0, "tokens"),
            ("score_memory", 1, "bytes"),
            ("sparse_from", 1, "keys"),
            ("kv_budget", 1, "rows"),
        ):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole_number(name, given, least, of))
        if self.kv_budget is not None:
            check_room("kv_budget", self.kv_budget, self.sinks)
        if self.scoring not in SCORINGS:
            known = " or ".join(SCORINGS)
            raise PolicyError(f"scoring must be {known}, not {self.scoring!r:.42}")

    def __str__(self):
        recency = f"up to {RECENCY}" if self.recency is None else self.recency
        return f"{self.sinks} sinks + {recency} recent"

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> SinkPolicy | None:
        """The policy that ``MLX_SINKS`` asks for, ``None`` where it is unset or off.

        The variable may say ``1`` (the defaults), ``0`` (off), or a list of fields such
        as ``sinks=8,score_memory=512MB``. In a list ``rotating=0`` switches one target
        off.

        Raises
        ------
        PolicyError
            It says anything else. The message quotes it and the accepted forms.
        """
        return Settings.from_env(environ).policy

    def fit(self, index_topk: int) -> SinkPolicy:
        """This policy with a recency that fits into ``index_topk`` columns.

        The sinks stay. A recency that was asked for and doesn't fit beside them is cut,
        with one warning for each policy and ``index_topk``.

        Raises
        ------
        PolicyError
            ``sinks >= index_topk``: no column would be left to the scores.
        """
        return _fit(self, index_topk)


@dataclass(frozen=True)
class Settings:
    """What ``MLX_SINKS`` says, read from it once.

    Parameters
    ----------
    policy : SinkPolicy, optional
        ``None`` where the variable is unset or off.
    off : tuple of str
        Names of the targets that it switches off, in the order of ``TARGETS``.
    """

    policy: SinkPolicy | None = None
    off: tuple[str, ...] = ()

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """What the variable says in ``environ``, by default ``os.environ``.

        Raises
        ------
        PolicyError
            As from ``SinkPolicy.from_env``.
        """
        value = (os.environ if environ is None else environ).get(VARIABLE, "")
        word = value.strip().lower()
        if word in OFF:
            return cls()
        try:
            given = {} if word in _ON else _parse(word)
        except PolicyError as error:
            message = f'{VARIABLE}="{value}": {error}; accepted: {ACCEPTED}'
            raise PolicyError(message) from None
        off = tuple(name for name in TARGETS if not given.pop(name, True))
        return cls(SinkPolicy(**given), off)

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the targets that are not off; none where there is no policy."""
        if self.policy is None:
            return ()
        return tuple(name for name in TARGETS if name not in self.off)

    def switched_on(self, target: str) -> Settings:
        """These settings with one target on; where all is off, the default policy."""
        off = tuple(name for name in self.off if name != target)
        return Settings(self.policy or SinkPolicy(), off)

    def without(self, targets: Iterable[str]) -> Settings:
        """These settings with more targets off; from no policy, the default one."""
        off = {*self.off, *targets}
        policy = self.policy or SinkPolicy()
        return Settings(policy, tuple(name for name in TARGETS if name in off))

    def value(self) -> str:
        """The variable's value that means these settings."""
        if self.policy is None:
            return "0"
        default = SinkPolicy()
        if self == Settings(default):
            return "1"
        given = [
            f"{field.name}={value}"
            for field in fields(SinkPolicy)
            if (value := getattr(self.policy, field.name))
            != getattr(default, field.name)
        ]
        return ",".join([*given, *(f"{name}=0" for name in self.off)])


def command_with(value: str, argv: list[str] | None = None) -> str:
    """A command for a shell that goes on with another value of the variable.

    Parameters
    ----------
    value : str
        The variable's value.
    argv : list of str, optional
        The command; by default this process's own. Where that can't be typed again, as
        a program read from standard input, the shell's own variable is set.
    """
    argv = _own_command() if argv is None else argv
    command = shlex.join(argv)
    if not argv[1:] or argv[-1] == "-" or "\n" in command or len(command) > 2000:
        return f"export {VARIABLE}={shlex.quote(value)}"
    return f"{VARIABLE}={shlex.quote(value)} {command}"


def _own_command() -> list[str]:
    interpreter, *words = sys.orig_argv or ["python"]
    script = words[0] if words else ""
    is_given = os.path.basename(script) == os.path.basename(sys.argv[0])
    if is_given and os.access(script, os.X_OK) and not script.endswith(".py"):
        return [_as_typed(script), *words[1:]]
    return [_as_typed(interpreter), *words]


def _as_typed(path: str) -> str:
    """A program's name, where the shell finds this very one by it."""
    name = os.path.basename(path)
    found = shutil.which(name)
    folders = (os.path.realpath(os.path.dirname(each)) for each in (found or "", path))
    return name if found and len(set(folders)) == 1 else path


@functools.lru_cache(maxsize=256)
def _fit(policy: SinkPolicy, index_topk: int) -> SinkPolicy:
    if index_topk < 1:
        raise PolicyError(
            f"the model's index_topk={index_topk} lets nothing be selected"
        )
    if policy.sinks >= index_topk:
        raise PolicyError(
            f"sinks={policy.sinks} must be smaller than the model's "
            f"index_topk={index_topk}: ask for at most {index_topk - 1}, "
            f'in {VARIABLE}="sinks=N" or SinkPolicy(sinks=N)'
        )
    room = index_topk - policy.sinks
    if policy.recency is None:
        return replace(policy, recency=min(RECENCY, index_topk // 2, room))
    if policy.recency <= room:
        return policy
    warn(
        f"recency={policy.recency} and sinks={policy.sinks} exceed the model's "
        f"index_topk={index_topk}: keeping {room} recent tokens",
    )
    return replace(policy, recency=room)


def whole_number(name: str, value: object, least: int = 0, of: str = "tokens") -> int:
    """Check a count that a program gives; it may be one of NumPy's integers."""
    try:
        count = operator.index(value)
    except TypeError:
        count = least - 1
    if isinstance(value, bool) or count < least:
        raise PolicyError(
            f"{name} must be a whole number of {of} >= {least}, not {value!r}"
        )
    return count


def recent_rows(budget: int) -> int:
    """Newest rows that a budget keeps by default."""
    return max(1, budget // 8)


def check_room(name: str, budget: int, sinks: int, recent: int | None = None) -> None:
    """Check that a budget has room for the sinks, the newest rows and one scored row.

    Raises
    ------
    PolicyError
        It has not; the message has the numbers.
    """
    recent = recent_rows(budget) if recent is None else recent
    if budget < (least := sinks + recent + 1):
        raise PolicyError(
            f"{name}={budget} has no room: {sinks} sinks, {recent} recent and one "
            f"scored row are {least}"
        )


def parse_count(name: str, text: str, least: int = 0, of: str = "tokens") -> int:
    """Parse a count that the variable or an option gives."""
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < least:
        raise PolicyError(
            f"{name} must be a whole number of {of} >= {least}, of at most nine "
            f"digits, not {text[:40]!r}"
        )
    return int(text)


def parse_size(name: str, text: str) -> int:
    """Parse a number of bytes that the variable gives: 512MB, 1.5GiB, 65536."""
    found = re.fullmatch(r"([0-9]{1,30})(\.[0-9]{1,3})?\s*([a-z]*)", text)
    if found and found[3] in _UNITS:
        whole, fraction, unit = found[1], found[2] or "0", _UNITS[found[3]]
        size = int(whole) * unit + round(float(fraction) * unit)
        if 0 < size < 2**63:
            return size
    raise PolicyError(f"{name} must be a size such as 512MB or 1GiB, not {text[:40]!r}")


# What parses each field's text, in the variable or an option.
PARSERS = {
    "sinks": parse_count,
    "recency": parse_count,
    "scoring": lambda name, text: SinkPolicy(scoring=text).scoring,
    "score_memory": parse_size,
    "sparse_from": lambda name, text: parse_count(name, text, 1, "keys"),
    "kv_budget": lambda name, text: parse_count(name, text, 1, "rows"),
}


def _parse(text: str) -> dict[str, Any]:
    """Parse a list of fields, and of targets with 0 or 1."""
    settings: dict[str, Any] = {}
    known = [*(field.name for field in fields(SinkPolicy)), *TARGETS]
    for item in text.split(","):
        name, _, value = (part.strip() for part in item.partition("="))
        if name not in known:
            near = difflib.get_close_matches(name.replace("-", "_"), known, 1)
            meant = f": did you mean {near[0]}?" if near else ""
            raise PolicyError(
                f"{name!r} is not a setting{meant} (known: {', '.join(known)})"
            )
        if name in settings:
            raise PolicyError(f"{name} is given twice")
        if name in PARSERS:
            settings[name] = PARSERS[name](name, value)
        elif value in _ON | (OFF - {""}):
            settings[name] = int(value in _ON)
        else:
            raise PolicyError(f"{name} must be 0 or 1, not {value[:40]!r}")
    return settings
