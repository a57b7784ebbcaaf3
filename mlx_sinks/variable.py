"""The environment variable, and the words that switch it off.

Every Python process reads this file while the variable is set: it imports nothing.
"""

VARIABLE = "MLX_SINKS"
QUIET_VARIABLE = "MLX_SINKS_QUIET"
OFF = frozenset({"", "0", "off", "false", "no"})
