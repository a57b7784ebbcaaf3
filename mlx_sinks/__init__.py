"""Attention sinks that stay alive in MLX language models.

The public names stand in ``__init__.pyi``. They are loaded on first use, so that the
start-up hook costs no import of MLX.
"""


def __getattr__(name):
    _attach()
    return __all__ if name == "__all__" else __getattr__(name)


def __dir__():
    _attach()
    return __dir__()


def _attach():
    """Read the names, once; lazy_loader's functions take the place of those above."""
    global __getattr__, __dir__, __all__
    # Not at the top: every Python process imports this file while MLX_SINKS is set.
    import lazy_loader

    __getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
