"""Work on a step's queries, a block of them at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress

import mlx.core as mx

from ..policy import SinkPolicy

CPU_MEMORY = 32 * 2**20
GPU_MEMORY = 2**30


@functools.cache
def default_memory(kind: mx.DeviceType) -> int:
    """Default bytes of a block: a fast size on a CPU, a small share of a GPU's."""
    if kind == mx.cpu:
        return CPU_MEMORY
    facts = mx.device_info(mx.Device(kind))
    size = facts.get("memory_size") or facts.get("total_memory") or 0
    return max(CPU_MEMORY, min(GPU_MEMORY, size // 64))


def block_memory(policy: SinkPolicy) -> int:
    """Bytes that a block of queries may take."""
    return policy.score_memory or default_memory(mx.default_device().type)


def by_blocks(
    L: int, step: int, act: Callable[[slice], mx.array], axis: int
) -> mx.array:
    """The results of ``act`` for all blocks of ``step`` of the L queries, in one."""
    results: list[mx.array] = []
    # A GPU would idle between a block's end and the next one's start.
    behind = mx.default_device() != mx.cpu
    for start in range(0, L, step):
        results.append(act(slice(start, min(start + step, L))))
        if step < L:
            # MLX allocates long before it computes: blocks would pile up in memory.
            # Inside a transformation such as mx.compile nothing can be evaluated.
            with suppress(ValueError):
                mx.async_eval(results[-1])
                mx.eval(results[-1 - behind :][0])
    return results[0] if len(results) == 1 else mx.concatenate(results, axis=axis)
