"""Activation by environment variable: ``mlx_sinks.pth`` calls ``start`` at start-up.

While the variable is set every Python process runs this, whatever it is about. So it
imports next to nothing, and waits with a finder of its own: wrapt, which does the same
for all later modules, takes longer to import than Python to start.
"""

from __future__ import annotations

import os
import sys

from .targets import OTHER_RUNTIMES, TARGETS
from .variable import OFF, VARIABLE


def start() -> None:
    """Wait for upstream packages. Called as Python starts, if ``MLX_SINKS`` is set."""
    if os.environ.get(VARIABLE, "").strip().lower() in OFF:
        return
    # A virtual environment may process its .pth files twice.
    if any(isinstance(finder, UpstreamFinder) for finder in sys.meta_path):
        return
    roots = {*OTHER_RUNTIMES, *(target.root for target in TARGETS.values())}
    for root in roots & sys.modules.keys():
        _on_package(root)
    sys.meta_path.insert(0, UpstreamFinder(roots - sys.modules.keys()))


class UpstreamFinder:
    """Finds upstream packages where they are, and prepares for their modules.

    Where that fails, the import of the package fails, and so does the next one: a
    module never runs unpatched.
    """

    def __init__(self, roots: set[str]):
        self._roots = roots

    def find_spec(self, name, path=None, target=None):
        # Programs that carry a copy of mlx-lm have it in a package of their own.
        if name not in self._roots and not name.endswith(".mlx_lm"):
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)):
                if spec.loader is not None and self._is_a_runtime(name, spec):
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None

    def _is_a_runtime(self, name: str, spec) -> bool:
        """Whether it runs models: an adapter may be called mlx_lm as well."""
        places = spec.submodule_search_locations or ()
        models = (os.path.join(place, "models", "cache.py") for place in places)
        return name in self._roots or any(map(os.path.exists, models))

    def prepare(self, root: str) -> None:
        """Look at the variable as the package is imported, not when it is found."""
        _on_package(root)
        self._roots.discard(root)


class _Loader:
    """The package's own loader, and what is done before it."""

    def __init__(self, loader, finder: UpstreamFinder):
        self._loader, self._finder = loader, finder

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._finder.prepare(module.__name__)
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)


def _on_package(root: str) -> None:
    from .on_import import prepare  # reads the variable's value

    prepare(root)
