"""What a probe reads, with which model, and how closely it looks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..policy import PolicyError


@dataclass(frozen=True)
class Reading:
    """A model, a text, and how the one reads the other.

    Parameters
    ----------
    model : str
        Folder or hub id.
    text : Path, optional
        File to read; by default Python's own manual.
    tokens : int, optional
        How many to read; by default twice the model's ``index_topk``.
    block : int, default=256
        Positions averaged in one figure.
    queries : int, default=8
        Queries looked at in each block.
    chunk : int, default=256
        Tokens a step.
    trust_remote_code : bool, default=False
        Whether the folder's own code may run.

    Raises
    ------
    PolicyError
        More queries than a block has positions.
    """

    model: str
    text: Path | None = None
    tokens: int | None = None
    block: int = 256
    queries: int = 8
    chunk: int = 256
    trust_remote_code: bool = False

    def __post_init__(self):
        if self.queries > self.block:
            raise PolicyError(f"--queries {self.queries} exceeds --block {self.block}")
