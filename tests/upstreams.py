"""Copies of the installed mlx-lm, as another release or a fork would be."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from importlib.metadata import distribution
from pathlib import Path
from types import MappingProxyType

import mlx_lm

HOME = Path(mlx_lm.__file__).parent
SOURCES = HOME / "models"


def copied(
    folder: Path,
    release: str | None = None,
    edits: Mapping[str, tuple[str, str]] = MappingProxyType({}),
) -> str:
    """The path of a copy, for ``PYTHONPATH``.

    ``edits`` has, for a file of ``models``, what to replace by what; a ``release``
    gives it metadata of its own.
    """
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(HOME, folder / "mlx_lm", ignore=ignored)
    for name, (old, new) in edits.items():
        file = folder / "mlx_lm" / "models" / name
        source = file.read_text()
        assert source.count(old) == 1, (name, source.count(old))
        file.write_text(source.replace(old, new))
    if release:
        facts = distribution("mlx-lm").read_text("METADATA")
        own = f"Version: {distribution('mlx-lm').version}\n"
        assert own in facts
        metadata = folder / f"mlx_lm-{release}.dist-info"
        metadata.mkdir()
        metadata.joinpath("METADATA").write_text(
            facts.replace(own, f"Version: {release}\n")
        )
    return str(folder)


def own_file(kind: str) -> str:
    """A ``model_file`` that holds a copy of upstream's architecture."""
    relative, absolute = "from .", "from mlx_lm.models."
    parts = [(SOURCES / "deepseek_v32.py").read_text().replace(relative, absolute)]
    if kind != "deepseek_v32":
        source = (SOURCES / f"{kind}.py").read_text()
        borrowed = "from .deepseek_v32 import Model as DSV32Model\n"
        assert borrowed in source
        source = source.replace(borrowed, "DSV32Model = Model\n")
        parts.append(source.replace(relative, absolute))
    return "\n".join(parts)
