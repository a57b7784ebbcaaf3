"""The upstream places that we patch: one entry for each target.

A new place takes one file in ``patches/`` and one entry here. Every Python process
reads this list while the variable is set: it imports next to nothing.
"""

from __future__ import annotations

import sys


class Target:
    """One upstream place, and where its patch is.

    Parameters
    ----------
    name : str
        As in ``install(targets=[...])`` and ``MLX_SINKS="name=0"``.
    package : str
        Upstream's distribution, as pip knows it.
    module : str
        Upstream's module. The patch is installed once the module is imported.
    tested : str
        Releases of the package that the patch was tested with, as pip writes a range.
    patch : str
        ``"file:Class"`` in ``patches/``.
    """

    def __init__(self, name: str, package: str, module: str, tested: str, patch: str):
        self.name, self.package, self.module = name, package, module
        self.tested, self.patch = tested, patch

    @property
    def root(self) -> str:
        """The package as Python imports it."""
        return self.module.partition(".")[0]

    @property
    def installed(self) -> bool:
        """Whether the package can be imported, or has metadata."""
        from importlib.util import find_spec

        known = self.root in sys.modules or find_spec(self.root) is not None
        return known or self.version() is not None

    def version(self) -> str | None:
        """The release of the package by its metadata; ``None`` where it has none."""
        from importlib import metadata

        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return None


def _mlx_lm(name: str, module: str, patch: str) -> Target:
    return Target(name, "mlx-lm", module, ">=0.31.3,<0.33", patch)


TARGETS = {
    target.name: target
    for target in (
        _mlx_lm(
            "dsa",
            module="mlx_lm.models.deepseek_v32",
            patch="mlx_lm_dsa:DSAPatch",
        ),
        _mlx_lm(
            "rotating",
            module="mlx_lm.models.cache",
            patch="mlx_lm_rotating:RotatingPatch",
        ),
        _mlx_lm(
            "index_share",
            module="mlx_lm.models.glm_moe_dsa",
            patch="mlx_lm_index_share:IndexSharePatch",
        ),
        _mlx_lm(
            "indexer_fidelity",
            module="mlx_lm.models.deepseek_v32",
            patch="mlx_lm_fidelity:FidelityPatch",
        ),
        _mlx_lm(
            "snapkv",
            module="mlx_lm.generate",
            patch="mlx_lm_snapkv:SnapKVPatch",
        ),
    )
}
