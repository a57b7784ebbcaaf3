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
        Any other is tried by the patch's self-check.
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

    def release(self) -> str:
        """The package and its release in words, with what we don't know of it."""
        from packaging.specifiers import SpecifierSet

        version = self.version()
        if version is None:
            return f"{self.package} of an unknown release"
        tested = SpecifierSet(self.tested).contains(version, prereleases=True)
        return f"{self.package} {version}" + " (untested)" * (not tested)


def backend_missing(error: BaseException | None) -> str | None:
    """A sentence where an error says that MLX has nothing to run on."""
    if not isinstance(error, ImportError) or "libmlx" not in str(error):
        return None
    return (
        f"MLX has no backend here ({error}); on Linux that is an extra: "
        "pip install 'mlx[cpu]' (or 'mlx[cuda13]')"
    )


def _mlx_lm(name: str, module: str, patch: str) -> Target:
    return Target(name, "mlx-lm", module, ">=0.31.3,<0.33", patch)


# Packages that run models by code of their own, where no target reaches them.
OTHER_RUNTIMES = frozenset({"mlx_vlm"})

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
            "sparse_attention",
            module="mlx_lm.models.deepseek_v32",
            patch="mlx_lm_sparse_attention:SparseAttentionPatch",
        ),
        _mlx_lm(
            "snapkv",
            module="mlx_lm.generate",
            patch="mlx_lm_snapkv:SnapKVPatch",
        ),
    )
}
