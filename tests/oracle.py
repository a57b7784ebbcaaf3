"""The contract of the selection, in plain NumPy loops.

Written from the text of the guarantee, without sight of the implementation, so that
each line can be held against a sentence of it. `left_padding` is a sequence of B
integers or None, `mask` a bool array that broadcasts to (B, 1, L, T) or None.
"""

from collections import Counter

import numpy as np


def shown_columns(B, L, T, mask=None):
    """(B, 1, L, T): the columns that the mask shows."""
    return np.broadcast_to(True if mask is None else mask, (B, 1, L, T))


def forced_columns(sinks, recency, B, L, T, left_padding=None, mask=None):
    """(B, 1, L, T): (sinks or recency), at or before the query, and shown."""
    shown = shown_columns(B, L, T, mask)
    forced = np.zeros((B, 1, L, T), dtype=bool)
    for b in range(B):
        f = 0 if left_padding is None else int(left_padding[b])
        for i in range(L):
            p = T - L + i
            for column in range(T):
                sink = f <= column <= f + sinks - 1
                recent = max(f, p - recency + 1) <= column <= p
                forced[b, 0, i, column] = (
                    (sink or recent) and column <= p and shown[b, 0, i, column]
                )
    return forced


def clamped_recency(sinks, recency, k):
    """Sinks stay, recency gets the slots that they leave; by default at most 128."""
    return min(min(128, k // 2) if recency is None else recency, k - sinks)


def rank(scores, exact_infinities):
    """What a score counts for: NaN as -inf.

    With `exact_infinities` false (float32) an infinity ties with the finite value
    that is next to it.
    """
    ranks = np.where(np.isnan(scores), -np.inf, scores).astype(np.float64)
    if exact_infinities:
        return ranks
    largest = float(np.finfo(np.float32).max)
    return np.clip(ranks, -largest, largest)


def selection_faults(columns, ranks, k, forced, shown):
    """Sentences, one for each way in which `columns` (B, 1, L, k) breaks the contract.

    Ties may be broken either way: of the columns chosen by score only the multiset of
    ranks is compared. Hidden columns are fillers, and any of them will do.
    """
    B, _, L, _ = ranks.shape
    if columns.shape != (B, 1, L, k):
        return [f"shape {columns.shape}, expected {(B, 1, L, k)}"]
    faults = []
    for b in range(B):
        for i in range(L):
            row = (b, 0, i)
            for fault in row_faults(
                [int(c) for c in columns[row]], ranks[row], k, forced[row], shown[row]
            ):
                faults.append(f"sequence {b}, query {i}: {fault}")
    return faults


def row_faults(chosen, ranks, k, forced, shown):
    T = len(ranks)
    if len(set(chosen)) != k:
        return [f"{sorted(chosen)} isn't {k} distinct columns"]
    if min(chosen) < 0 or max(chosen) >= T:
        return [f"{sorted(chosen)} leaves the {T} columns"]

    faults = []
    missing = [c for c in range(T) if forced[c] and c not in chosen]
    if missing:
        faults.append(f"forced columns {missing} are missing from {sorted(chosen)}")

    hidden = [c for c in chosen if not shown[c]]
    fillers = max(0, k - int(shown.sum()))
    if len(hidden) != fillers:
        faults.append(f"hidden columns {sorted(hidden)} fill {fillers} slots")

    rest = [c for c in range(T) if shown[c] and not forced[c]]
    free = k - int(forced.sum()) - fillers
    best = Counter(sorted((ranks[c] for c in rest), reverse=True)[:free])
    got = Counter(ranks[c] for c in chosen if c in rest)
    if got != best:
        faults.append(
            f"by score: lacks {sorted((best - got).elements())}, "
            f"has instead {sorted((got - best).elements())}"
        )
    return faults
