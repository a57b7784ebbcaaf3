"""An indexer that outscores its sinks: lost in stock mlx-lm, kept by the guarantee."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import deepseek_v32
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import BatchKVCache, KVCache

import mlx_sinks
from mlx_sinks import SinkPolicy

HIDDEN, TOPK, SINKS, RECENCY = 64, 16, 4, 4
POLICY = SinkPolicy(SINKS, RECENCY)
SINK, DISTRACTOR, PLAIN = range(3)


@pytest.fixture
def indexer():
    """Queries of any token match the distractors' keys, and oppose the sinks'."""
    mx.random.seed(0)
    args = deepseek_v32.ModelArgs(
        hidden_size=HIDDEN,
        q_lora_rank=HIDDEN,
        index_n_heads=4,
        index_head_dim=32,
        index_topk=TOPK,
        qk_rope_head_dim=8,
    )
    indexer = deepseek_v32.Indexer(args)
    key = indexer.k_norm(indexer.wk(token_states([DISTRACTOR])))[0, 0]
    unrotated = mx.arange(32) >= args.qk_rope_head_dim
    query = mx.tile(mx.where(unrotated, key, 0), 4)
    # qr is the hidden state here; its first entry is 1 in every token.
    indexer.wq_b.weight = mx.zeros((128, HIDDEN)).at[:, 0].add(query)
    indexer.weights_proj.weight = mx.zeros((4, HIDDEN)).at[:, 0].add(1.0)
    return indexer


def token_states(kinds, seed=1):
    """Hidden states (1, L, hidden): opposed for sinks and distractors, else noise."""
    rng = np.random.default_rng(seed)
    direction = np.random.default_rng(2).standard_normal(HIDDEN)
    states = 0.05 * rng.standard_normal((len(kinds), HIDDEN))
    for state, kind in zip(states, kinds):
        state += {SINK: -direction, DISTRACTOR: direction, PLAIN: 0 * direction}[kind]
    states[:, 0] = 1.0
    return mx.array(states[None], mx.float32)


def sequence(plain):
    return [SINK] * SINKS + [DISTRACTOR] * 30 + [PLAIN] * plain


def selected_sets(indexer, states, cache):
    """Prefill all but the last token, then decode it: the decoded selection."""
    for part in (states[:, :-1], states[:, -1:]):
        mask = create_attention_mask(part, cache, return_array=True)
        columns = indexer(part, part, mask, cache)
    return [set(row) for row in columns[:, 0, 0].tolist()]


def test_stock_loses_every_sink_to_the_distractors(indexer):
    (columns,) = selected_sets(indexer, token_states(sequence(12)), KVCache())
    assert not columns & set(range(SINKS))
    assert columns <= set(range(SINKS, SINKS + 30))


def test_the_guarantee_keeps_them_and_fills_up_by_score(indexer):
    states = token_states(sequence(12))
    T = states.shape[1]
    with mlx_sinks.patched(POLICY):
        (columns,) = selected_sets(indexer, states, KVCache())
    forced = set(range(SINKS)) | set(range(T - RECENCY, T))
    assert forced <= columns
    assert len(columns) == TOPK
    assert columns - forced <= set(range(SINKS, SINKS + 30))


@pytest.mark.parametrize("guarantee", [False, True])
def test_left_padded_batch(indexer, guarantee):
    lengths = [46, 40, 35]
    T = max(lengths)
    padding = [T - length for length in lengths]
    rows = [token_states(sequence(n - SINKS - 30), seed=n) for n in lengths]
    states = mx.concatenate(
        [mx.pad(row, [(0, 0), (f, 0), (0, 0)]) for f, row in zip(padding, rows)]
    )
    if guarantee:
        mlx_sinks.install(POLICY)
    together = selected_sets(indexer, states, BatchKVCache(padding))
    for f, row, columns in zip(padding, rows, together):
        (alone,) = selected_sets(indexer, row, KVCache())
        assert columns == {f + column for column in alone}
        sinks = set(range(f, f + SINKS))
        assert sinks <= columns if guarantee else not sinks & columns


def test_without_a_cache(indexer):
    states = token_states(sequence(12))
    mask = create_attention_mask(states, None, return_array=True)
    T = states.shape[1]
    with mlx_sinks.patched(POLICY):
        columns = np.array(indexer(states, states, mask))
    for query in range(TOPK, T):
        assert set(range(SINKS)) <= set(columns[0, 0, query].tolist())


def test_dense_while_everything_fits(indexer):
    with mlx_sinks.patched(POLICY):
        states = token_states([PLAIN] * TOPK)
        assert indexer(states, states, None, KVCache()) is None


def test_too_many_sinks_are_refused_before_they_could_matter(indexer):
    states = token_states([PLAIN] * 2)
    with (
        mlx_sinks.patched(SinkPolicy(sinks=TOPK)),
        pytest.raises(ValueError, match=rf"sinks={TOPK}.*index_topk={TOPK}"),
    ):
        indexer(states, states, None, KVCache())


def test_nan_hidden_states_do_not_cost_a_sink(indexer):
    states = token_states(sequence(12))
    states[0, 20] = mx.nan
    with mlx_sinks.patched(POLICY):
        (columns,) = selected_sets(indexer, states, KVCache())
    assert set(range(SINKS)) <= columns


def test_no_host_synchronisation_in_the_forward(indexer, monkeypatch):
    """Traced by mx.compile, the forward can't look at a value."""
    monkeypatch.undo()  # the watching of selections does look
    states = token_states(sequence(12))
    mask = create_attention_mask(states, None, return_array=True)
    with mlx_sinks.patched(POLICY):
        expected = np.sort(np.array(indexer(states, states, mask)))
        traced = mx.compile(lambda x, mask: indexer(x, x, mask))(states, mask)
    past = slice(TOPK, None)  # earlier queries have free slots, filled either way
    np.testing.assert_array_equal(
        np.sort(np.array(traced))[:, :, past], expected[:, :, past]
    )
