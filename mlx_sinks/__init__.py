"""Attention sinks that stay alive in MLX language models.

The public names stand in ``__init__.pyi``. They are loaded on first use, so that the
start-up hook costs no import of MLX.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
