"""Attention sinks that stay alive in MLX language models.

The public names stand in ``__init__.pyi``. They are loaded on first use, so that the
start-up hook costs no import of MLX.
"""


def _from_stub():
    # Not at the top: every Python process imports this file while MLX_SINKS is set.
    import lazy_loader

    return lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name):
    load, _, names = _from_stub()
    return names if name == "__all__" else load(name)


def __dir__():
    return _from_stub()[1]()
