"""Loading a model with mlx-lm, on each release that is supported."""

from __future__ import annotations

import inspect

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load

from ..variable import VARIABLE


def load_model(
    path: str, trust_remote_code: bool = False
) -> tuple[nn.Module, TokenizerWrapper]:
    """The model and tokenizer of a folder or hub id, as mlx-lm's own commands load it.

    Raises
    ------
    ValueError
        With upstream's reason: no such model, weights that don't fit, or code of its
        own that isn't trusted.
    """
    options = {}
    if trust_remote_code:
        options["tokenizer_config"] = {"trust_remote_code": True}
        # Releases before 0.32 run a folder's own architecture without being asked.
        if "trust_remote_code" in inspect.signature(load).parameters:
            options["trust_remote_code"] = True
    try:
        return load(path, **options)
    except (OSError, ValueError) as error:
        reason = f"can't load {path}: {error}"
        if "Missing" in reason and ".indexer." in reason:
            reason = (
                f"can't load {path}: layers without an indexer share another's, which "
                f"stock mlx-lm doesn't know. Set {VARIABLE}=1; if that is not it, "
                "mlx-sinks doctor MODEL says more"
            )
        if not trust_remote_code and "trust_remote_code" in reason:
            reason += " (on the command line: --trust-remote-code)"
        raise ValueError(reason) from error
