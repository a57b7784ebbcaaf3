"""Loading a model folder with its own architecture on every supported mlx-lm."""

from __future__ import annotations

import inspect
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load


def load_folder(folder: str) -> tuple[nn.Module, TokenizerWrapper, dict]:
    """The model, tokenizer and configuration of a folder that build.py wrote.

    Raises
    ------
    FileNotFoundError
        No such folder; mlx-lm would look for it on a hub.
    """
    if not Path(folder, "smollm2_dsa.py").is_file():
        raise FileNotFoundError(f"{folder} is no model folder that build.py wrote")
    # Releases before 0.32 run the folder's architecture without being asked.
    trusted = "trust_remote_code" in inspect.signature(load).parameters
    options = {"trust_remote_code": True} if trusted else {}
    model, tokenizer, config = load(folder, return_config=True, **options)
    if mx.default_device() == mx.Device(mx.cpu):
        _make_fast_for_reference_blas(model)
    return model, tokenizer, config


def _make_fast_for_reference_blas(model: nn.Module) -> None:
    """Weights stored input-major, equal in value: the CPU wheel multiplies them faster.

    Its reference BLAS runs ``x @ weight.T`` at half the speed on rows of outputs.
    """
    for part in model.modules():
        if isinstance(part, (nn.Linear, nn.Embedding)):
            part.weight = mx.contiguous(part.weight.T).T
    mx.eval(model.parameters())
