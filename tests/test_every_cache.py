"""The laws that hold for every cache of ours, whatever it keeps."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as upstream

import mlx_sinks
import small_models
from mlx_sinks import SinkPolicy, compact_prompt_cache

SEEN = small_models.tokens(3, 40)
NEXT = small_models.tokens(4, 6)


def sink_cache(model):
    return mlx_sinks.make_sink_cache(model, 16)


def local(model):
    return mlx_sinks.make_sink_cache(model, 16, position_mode="local")


def short(model):
    """Nothing was evicted: there are free columns."""
    return mlx_sinks.make_sink_cache(model, 512)


def compacted(model):
    method = mlx_sinks.SnapKV(16, min_tokens=0)
    return compact_prompt_cache(model, SEEN, method)


def whole(model):
    return compact_prompt_cache(model, SEEN, 512)


MADE = {each.__name__: each for each in (sink_cache, local, short, compacted, whole)}


@pytest.fixture(scope="module")
def model():
    return small_models.make_llama(num_hidden_layers=2)


@pytest.fixture(params=MADE)
def caches(request, model):
    """The caches of a prompt that was read."""
    made = MADE[request.param](model)
    if made[0].offset == 0:
        model(mx.array([SEEN]), cache=made)
    return made


def logits(model, caches, tokens, cut=1):
    rows = [
        model(mx.array([tokens[n : n + cut]]), cache=caches)[0]
        for n in range(0, len(tokens), cut)
    ]
    return np.array(mx.concatenate(rows))


def snapshot(caches):
    return [type(cache).from_state(cache.state) for cache in caches]


@pytest.mark.parametrize("cut", [1, 3])
def test_a_snapshot_by_its_state_goes_its_own_way(model, caches, cut):
    """Neither writes into what the other holds."""
    copies = [snapshot(caches) for _ in range(3)]
    expected = logits(model, copies[0], NEXT, cut)
    other = small_models.tokens(9, 6)
    assert not np.allclose(logits(model, caches, other, cut), expected)
    assert np.array_equal(logits(model, copies[1], NEXT, cut), expected)
    assert np.array_equal(logits(model, copies[2], NEXT, cut), expected)


def test_two_that_were_given_one_state_are_apart(model, caches):
    state = [cache.state for cache in caches]
    first, second = (
        [type(cache).from_state(each) for cache, each in zip(caches, state)]
        for _ in range(2)
    )
    expected = logits(model, first, NEXT)
    assert np.array_equal(logits(model, second, NEXT), expected)


def test_what_check_trim_allows_is_what_trim_does(model, caches):
    for n in (1, 3, 20, 39, 99):
        for cache in snapshot(caches):
            offset = cache.offset
            try:
                cache.check_trim(n)
            except ValueError as refused:
                with pytest.raises(ValueError, match=str(refused)[:20]):
                    cache.trim(n)
                assert cache.offset == offset
            else:
                assert cache.trim(n) == min(n, offset)


class Trims(upstream.KVCache):
    """Another layer's cache, which trims any number."""


@pytest.mark.parametrize("ours_first", [False, True])
def test_a_list_is_trimmed_as_a_whole_or_not_at_all(model, ours_first):
    """As olmo3's: plain layers beside sliding ones."""
    mlx_sinks.install(SinkPolicy())
    for make, n in ((compacted, 30), (compacted, 1), (short, 30)):
        mixed = make(model)
        if mixed[0].offset == 0:
            model(mx.array([SEEN]), cache=mixed)
        plain = Trims()
        plain.update_and_fetch(*[mx.zeros((1, 1, len(SEEN), 8))] * 2)
        mixed = [*mixed, plain] if ours_first else [plain, *mixed]
        before = [cache.offset for cache in mixed]
        assert upstream.can_trim_prompt_cache(mixed)
        if make is compacted and n == 30:
            with pytest.raises(ValueError, match="can't trim 30 tokens"):
                upstream.trim_prompt_cache(mixed, n)
            assert [cache.offset for cache in mixed] == before
        else:
            assert upstream.trim_prompt_cache(mixed, n) == n
            assert [cache.offset for cache in mixed] == [each - n for each in before]


@pytest.mark.parametrize("keep", [0, 4])
def test_a_rotating_window_refuses_a_trim_past_an_eviction(keep):
    mlx_sinks.install(targets=["rotating"])
    cache = upstream.RotatingKVCache(max_size=16, keep=keep)
    step = mx.zeros((1, 1, 12, 8))
    cache.update_and_fetch(step, step)
    assert cache.trim(2) == 2
    cache.update_and_fetch(step, step)
    assert not cache.is_trimmable()
    assert cache.trim(0) == 0
    if keep:
        with pytest.raises(ValueError, match="the window of 16 has evicted"):
            cache.trim(3)
        assert cache.offset == 22
    else:  # a model's own sliding layer: upstream's business
        assert cache.trim(3) == 3


@pytest.mark.parametrize("index_topk", [0, -1])
def test_an_index_topk_that_selects_nothing(index_topk):
    with pytest.raises(mlx_sinks.PolicyError, match=f"index_topk={index_topk} lets no"):
        SinkPolicy().fit(index_topk)


def test_a_batch_of_no_sequences():
    model = small_models.make()
    indexer = model.layers[0].self_attn.indexer
    nothing = mx.zeros((0, 20, 64))
    stock = indexer(nothing, nothing, None)
    mlx_sinks.install()
    assert indexer(nothing, nothing, None).shape == stock.shape == (0, 1, 20, 16)
