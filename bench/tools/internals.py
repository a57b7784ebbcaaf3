"""What the scripts use of mlx_sinks beyond its public names, in one place.

``watching`` gives a training the scores that a selection chooses from; ``by_layer``
and ``skill`` are what the probe command shows. (probe_cost.py measures the
hook of the selection itself, and knows its module.)
"""

from mlx_sinks.probing.report import by_layer
from mlx_sinks.probing.skill import skill
from mlx_sinks.sparse.selection import watching

__all__ = ["by_layer", "skill", "watching"]
