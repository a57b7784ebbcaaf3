"""Greedy tokens of a model that ``mlx.launch`` has spread over several processes.

``mlx.launch … -- python several_machines.py tensor|pipeline MODEL COUNT OUT`` reads
``OUT/prompts.json``; rank R leaves its tokens in ``OUT/R.json``, all it says in
``OUT/R.log``.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path


def tokens(model, prompts: list[list[int]], count: int) -> dict[str, list[list[int]]]:
    """Of each prompt by itself, and of all as a batch, as upstream's server has it."""
    from batches import alone_tokens, batch_tokens

    alone = [alone_tokens(model, prompt, None, count) for prompt in prompts]
    together, _ = batch_tokens(model, prompts, None, count)
    return {"alone": alone, "together": together}


def main(parallelism: str, folder: str, count: str, out: str) -> None:
    rank, out = os.environ["MLX_RANK"], Path(out)
    with (out / f"{rank}.log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    # Each rank compiles kernels of its own shapes, into files of its own: see conftest.
    compiled, own = Path(tempfile.gettempdir()) / "mlx", out / f"kernels{rank}"
    if compiled.exists():
        shutil.copytree(compiled, own / "mlx", dirs_exist_ok=True)
    own.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = str(own)
    import mlx.core as mx
    from mlx_lm.utils import sharded_load

    group = mx.distributed.init(strict=True)
    assert group.rank() == int(rank)
    model, _ = sharded_load(folder, **{f"{parallelism}_group": group})
    prompts = json.loads((out / "prompts.json").read_text())
    (out / f"{rank}.json").write_text(json.dumps(tokens(model, prompts, int(count))))
    # The ring breaks when one process leaves, even under the other's last step.
    while not all((out / f"{r}.json").exists() for r in range(group.size())):
        time.sleep(0.02)
    os._exit(0)  # mlx on CPU may abort on its way out


if __name__ == "__main__":
    main(*sys.argv[1:])
