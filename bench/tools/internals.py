"""What the scripts use of mlx_sinks beyond its public names, in one place.

``listening`` gives a training the scores that a selection chooses from, ``by_layer``
and ``skill`` are the figures that the probe command shows. (probe_cost.py measures the
hook of the selection itself, and knows its module.)
"""

from mlx_sinks.probing.report import by_layer, skill
from mlx_sinks.sparse.selection import listening

__all__ = ["by_layer", "listening", "skill"]
