"""Calls of the selection, drawn by Hypothesis, and what an oracle says of each.

`HYPOTHESIS_PROFILE=explore` draws new examples on each run, and
`HYPOTHESIS_PROFILE=explore pytest --hypothesis-seed=N` draws those of seed N.
"""

import os
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import oracle
from mlx_sinks import SinkPolicy
from mlx_sinks.sparse.selection import select_columns

COMMON = dict(
    deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("contract", derandomize=True, **COMMON)
settings.register_profile("explore", derandomize=False, **COMMON)
PROFILE = settings.get_profile(os.environ.get("HYPOTHESIS_PROFILE", "contract"))

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
LARGEST = {"float32": 3.4028234663852886e38, "float16": 65504.0}
LARGEST["bfloat16"] = 3.3895313892515355e38


def examples(n):
    return settings(PROFILE, max_examples=n)


def to_mlx(values, dtype="float32"):
    return mx.array(np.asarray(values, dtype=np.float32)).astype(DTYPES[dtype])


def to_numpy(array):
    """float16 and bfloat16 values are all float32 values, so nothing is rounded."""
    return np.array(array.astype(mx.float32))


def build_scores(kind, seed, shape, dtype):
    rng = np.random.default_rng(seed)
    largest = LARGEST[dtype]
    special = [np.nan, np.inf, -np.inf, largest, -largest, 0.0, -0.0, 1.0, -1.0]
    if kind == "normal":
        values = rng.standard_normal(shape)
    elif kind == "distinct":
        order = np.argsort(rng.random(shape), axis=-1)
        values = order - shape[-1] // 2
    elif kind == "ties":
        values = rng.integers(-2, 3, shape)
    elif kind == "special":
        values = rng.choice(special, shape)
    elif kind == "mixed":
        values = np.where(
            rng.random(shape) < 0.3,
            rng.choice(special, shape),
            rng.standard_normal(shape),
        )
    elif kind == "bits":
        if dtype == "float32":
            bits = rng.integers(0, 2**32, shape, dtype=np.uint32)
        else:
            bits = rng.integers(0, 2**16, shape, dtype=np.uint16)
        return mx.array(bits).view(DTYPES[dtype])
    else:
        values = np.full(shape, {"nan": np.nan, "lowest": -np.inf, "top": np.inf}[kind])
    return to_mlx(values, dtype)


FINITE = ["normal", "distinct", "ties"]
KINDS = [*FINITE, "special", "mixed", "bits", "nan", "lowest", "top"]


def causal(L, T):
    """What upstream builds for a KVCache, as (L, T)."""
    return np.arange(T) <= np.arange(T - L, T)[:, None]


def padded_causal(L, T, left, right=None):
    """What upstream builds for a BatchKVCache, as (B, 1, L, T)."""
    columns = np.arange(T)
    mask = causal(L, T) & (columns >= np.reshape(left, (-1, 1, 1, 1)))
    if right is not None:
        mask = mask & (columns < T - np.reshape(right, (-1, 1, 1, 1)))
    return mask


@dataclass(frozen=True)
class Case:
    """One call, small enough to be read in a failure."""

    B: int
    L: int
    T: int
    k: int
    sinks: int
    recency: int
    dtype: str = "float32"
    kind: str = "normal"
    seed: int = 0
    left: tuple | None = None
    right: tuple | None = None
    mask_kind: str = "none"
    mask_shape: str = "B1LT"
    density: float = 0.5

    @property
    def policy(self):
        return SinkPolicy(sinks=self.sinks, recency=self.recency)

    @property
    def scores(self):
        return build_scores(
            self.kind, self.seed, (self.B, 1, self.L, self.T), self.dtype
        )

    @property
    def left_padding(self):
        return None if self.left is None else mx.array(self.left)

    @property
    def mask(self):
        left = self.left or (0,) * self.B
        if self.mask_kind == "none":
            return None
        if self.mask_kind == "causal":
            return causal(self.L, self.T)
        if self.mask_kind == "left":
            return padded_causal(self.L, self.T, left)
        if self.mask_kind == "left and right":
            return padded_causal(self.L, self.T, left, self.right)
        shape = {
            "B1LT": (self.B, 1, self.L, self.T),
            "11LT": (1, 1, self.L, self.T),
            "B11T": (self.B, 1, 1, self.T),
            "LT": (self.L, self.T),
            "1T": (1, self.T),
        }[self.mask_shape]
        return np.random.default_rng(self.seed + 1).random(shape) < self.density

    @property
    def shown(self):
        return oracle.shown_columns(self.B, self.L, self.T, self.mask)

    @property
    def forced(self):
        recency = oracle.clamped_recency(self.sinks, self.recency, self.k)
        return oracle.forced_columns(
            self.sinks, recency, self.B, self.L, self.T, self.left, self.mask
        )

    @property
    def ranks(self):
        return oracle.rank(to_numpy(self.scores), self.dtype != "float32")

    def arguments(self):
        mask = None if self.mask is None else mx.array(self.mask)
        return self.scores, self.k, self.policy, self.left_padding, mask

    def faults(self, columns):
        return oracle.selection_faults(
            columns, self.ranks, self.k, self.forced, self.shown
        )


def select(scores, k, policy, left_padding=None, mask=None):
    """The selection as NumPy."""
    columns = select_columns(scores, k, policy, left_padding, mask)
    if columns is None:
        return None
    assert mx.issubdtype(columns.dtype, mx.integer)
    return np.array(columns)


def row_sets(columns):
    return [[set(row.tolist()) for row in queries[0]] for queries in columns]


@st.composite
def paddings(draw, B, T):
    """Ragged, and as large as the buffer now and then."""
    return tuple(draw(st.lists(st.integers(0, T), min_size=B, max_size=B)))


@st.composite
def cases(draw, kinds=KINDS, sparse=True):
    """`sparse`: T > k, so that there is something to select."""
    T = draw(st.integers(2 if sparse else 1, 40))
    B = draw(st.integers(1, 3))
    L = draw(st.integers(1, min(6, T)))
    k = draw(st.integers(1, T - 1 if sparse else T + 2))
    mask_kind = draw(
        st.sampled_from(["none", "causal", "left", "left and right", "random"])
    )
    return Case(
        B=B,
        L=L,
        T=T,
        k=k,
        sinks=draw(st.integers(0, k - 1) | st.integers(0, min(4, k - 1))),
        recency=draw(st.integers(0, 3) | st.integers(0, k + 3) | st.just(10**6)),
        dtype=draw(st.sampled_from(list(DTYPES))),
        kind=draw(st.sampled_from(kinds)),
        seed=draw(st.integers(0, 2**32 - 1)),
        left=draw(st.none() | paddings(B, T)),
        right=draw(paddings(B, T)) if mask_kind == "left and right" else None,
        mask_kind=mask_kind,
        mask_shape=draw(st.sampled_from(["B1LT", "11LT", "B11T", "LT", "1T"]))
        if mask_kind == "random"
        else "B1LT",
        density=draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
        if mask_kind == "random"
        else 0.5,
    )
