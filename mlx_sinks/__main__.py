"""``python -m mlx_sinks`` is the command ``mlx-sinks``."""

import sys

from .cli import main

sys.exit(main())
