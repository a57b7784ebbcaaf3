"""Another release of a package than the installed one, as its metadata would say."""

from importlib import metadata

# The same for a process that runs this first.
PRETEND = """
from importlib import metadata
release = metadata.version
metadata.version = lambda name: "{release}" if name == "{package}" else release(name)
"""


def pretend(monkeypatch, package, release):
    """Have the metadata of a package name a release, or be missing where it's None."""
    installed = metadata.version

    def version(name):
        if name != package:
            return installed(name)
        if release is None:
            raise metadata.PackageNotFoundError(name)
        return release

    monkeypatch.setattr(metadata, "version", version)
