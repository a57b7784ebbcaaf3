"""One file per upstream place that loses sinks, and the registry that installs them."""
