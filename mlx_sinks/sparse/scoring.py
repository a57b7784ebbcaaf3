"""A learned indexer's scores, computed by blocks of queries when they are needed."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class IndexScores:
    """Scores of the lightning indexer, computed a block of queries at a time.

    The score of query ``i`` and key ``t`` is ``sum_h weight[i, h] * relu(query[i, h] @
    key[t])``, as in the DeepSeek-V3.2 report. All heads share the keys: one product
    multiplies a block's queries, (rows * H) x D, by the keys, D x T. A second product
    sums over heads, in float32.

    Parameters
    ----------
    queries : mx.array, shape (B, H, L, D)
        Rotated.
    keys : mx.array, shape (B, 1, T, D)
        Rotated, in the queries' dtype.
    weights : mx.array, shape (B, L, H)
        Each head's weight, scaled.
    memory : int
        Bytes that a block may take while it is scored and selected from. A block has
        at least one query.
    """

    queries: mx.array
    keys: mx.array
    weights: mx.array
    memory: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, 1, L, T), as an array of all scores would have."""
        B, _, L, _ = self.queries.shape
        return B, 1, L, self.keys.shape[2]

    @property
    def rows(self) -> int:
        """Number of queries in a block."""
        B, H, L, D = self.queries.shape
        T, size = self.keys.shape[2], mx.float32.size
        # In float32 a query takes D + T numbers for each head (its query and products)
        # and 6 T for the sum over heads and the selection. A CPU may copy the keys too.
        query = B * size * (H * (D + T) + 6 * T)
        keys = B * T * D * size * (self.keys.dtype != self._factor_type)
        return max(1, min(L, (self.memory - keys) // max(query, 1)))  # B may be 0

    def block(self, rows: slice) -> mx.array:
        """The scores of some queries, (B, 1, rows, T) in float32."""
        queries = self.queries[:, :, rows].astype(self._factor_type)
        B, H, L, D = queries.shape
        queries = queries.swapaxes(1, 2).reshape(B, L * H, D)
        products = mx.maximum(queries @ self._columns, 0)
        products = products.reshape(B, L, H, self.keys.shape[2])
        weights = self.weights[:, rows, None]
        scores = weights.astype(mx.float32) @ products.astype(mx.float32)
        return scores.swapaxes(1, 2)

    @functools.cached_property
    def _columns(self) -> mx.array:
        """The keys as a matrix, (B, D, T)."""
        return self.keys[:, 0].astype(self._factor_type).swapaxes(-1, -2)

    @property
    def _factor_type(self) -> mx.Dtype:
        # On a CPU MLX multiplies half precision slowly, and has a BLAS for float32.
        on_cpu = mx.default_device() == mx.cpu
        return mx.float32 if on_cpu else self.keys.dtype
