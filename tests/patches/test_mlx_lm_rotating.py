"""Rotating caches under the patch: who sees which token, alone and in batches."""

import re
import sys

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import cache as upstream
from mlx_lm.models.cache import BatchRotatingKVCache, KVCache, RotatingKVCache

import mlx_sinks
import small_models
import window_oracle
from batch_histories import hold
from batches import run_out
from lines import heard
from mlx_sinks import PatchError, PolicyError, SinkPolicy
from mlx_sinks.patches.registry import patch_of
from window_streams import NOISE, WindowHistory


@pytest.fixture
def on():
    mlx_sinks.install(SinkPolicy(sinks=3), targets=["rotating"])


def numbered(starts, N):
    """Keys of several sequences that are their own positions, plus 1000 a sequence."""
    rows = [1000 * b + start + np.arange(N) for b, start in enumerate(starts)]
    return mx.array(np.array(rows, np.float32)[:, None, :, None])


def seen_in(cache, keys, window_size=None, return_array=False):
    """For each sequence and query of a step the keys that it sees."""
    B, _, N, _ = keys.shape
    mask = cache.make_mask(N, window_size, return_array)
    held = np.array(cache.update_and_fetch(keys, keys)[0])[:, 0, :, 0].astype(int)
    shown = np.broadcast_to(
        window_oracle.shown(mask, N, held.shape[1]), (B, 1, N, held.shape[1])
    )
    return [[set(held[b][row]) for row in shown[b, 0]] for b in range(B)]


def expected(start, N, window, keep, row=0):
    shown = window_oracle.visible(start + N, window, keep)[start:]
    return [{1000 * row + p for p in np.flatnonzero(line)} for line in shown]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_each_query_sees_the_kept_and_the_newest(data):
    window = data.draw(st.integers(2, 24))
    keep = data.draw(st.integers(1, window - 1))
    cuts = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=8))
    with mlx_sinks.patched(targets=["rotating"]):
        cache, start = RotatingKVCache(window, keep=keep), 0
        for N in cuts:
            narrow = data.draw(st.none() | st.integers(1, window))
            array = data.draw(st.booleans())
            (seen,) = seen_in(cache, numbered([start], N), narrow, array)
            narrowed = window if narrow is None else min(window, keep + narrow)
            assert seen == expected(start, N, narrowed, keep)
            start += N


def test_stock_hides_them():
    """What the patch is for, in the releases that it is for."""
    cache = RotatingKVCache(8, keep=3)
    (seen,) = seen_in(cache, numbered([0], 20))
    assert seen != expected(0, 20, 8, 3)
    assert not any({0, 1, 2} & row for row in seen[10:])


class RotatingHistory(WindowHistory):
    def set_up(self, draw):
        mlx_sinks.install(targets=["rotating"])
        self.window = draw(st.integers(2, 12), "window")
        self.sinks = draw(st.integers(1, self.window - 1), "keep")

    def make(self):
        return RotatingKVCache(self.window, keep=self.sinks)

    def check_facts(self, cache, seen):
        assert (type(cache), cache.keep) == (RotatingKVCache, self.sinks)
        assert (cache.max_size, cache.offset) == (self.window, seen)

    def teardown(self):
        super().teardown()
        mlx_sinks.uninstall()


def test_ragged_batches_of_any_history():
    hold(RotatingHistory, examples=50, steps=5)


def test_windows_without_kept_tokens_are_upstreams_own(on):
    """A model's sliding layers: trained with a window, and without sinks."""
    for N, seen in ((1, 3), (7, 0), (9, 20)):
        masks = []
        for patch in (True, False):
            if not patch:
                mlx_sinks.uninstall()
            cache = RotatingKVCache(8)
            cache.update_and_fetch(*[numbered([0], max(seen, 1))] * 2)
            masks.append(cache.make_mask(N, return_array=N > 1))
        mlx_sinks.install(SinkPolicy(sinks=3), targets=["rotating"])
        assert masks[0] is masks[1] or mx.array_equal(*masks).item()
    assert type(RotatingKVCache.merge([RotatingKVCache(8)])) is BatchRotatingKVCache
    with pytest.raises(NotImplementedError):
        RotatingKVCache(8).to_quantized()


# ------------------------------------------------------------------------- models


def tokens(seed, length=90):
    return mx.array(np.random.default_rng(seed).integers(0, 256, (1, length)))


def logits(model, inputs, chunk, cache):
    parts = []
    for start in range(0, inputs.shape[1], chunk):
        parts.append(model(inputs[:, start : start + chunk], cache=cache))
        mx.eval(parts[-1], [layer.state for layer in cache])
    return np.array(mx.concatenate(parts, axis=1))


@pytest.mark.parametrize("chunk", [1, 7, 19, 20, 64, 90])
def test_chunk_sizes_do_not_matter(on, chunk):
    model = small_models.make_llama(num_hidden_layers=2)
    decode = logits(model, tokens(0), 1, mlx_sinks.make_sink_cache(model, 20, sinks=3))
    ours = logits(model, tokens(0), chunk, upstream.make_prompt_cache(model, 20))
    np.testing.assert_allclose(ours, decode, **NOISE)


def test_max_kv_size_reaches_plain_layers_with_the_policys_sinks(on):
    """llama has a make_cache, where upstream overlooks max_kv_size."""
    for cache in upstream.make_prompt_cache(small_models.make_llama(), 20):
        assert type(cache) is RotatingKVCache
        assert (cache.max_size, cache.keep) == (20, 3)
    mlx_sinks.uninstall()
    (cache,) = upstream.make_prompt_cache(small_models.make_llama(), 20)
    assert type(cache) is KVCache


def test_without_a_size_the_cache_is_upstreams(on):
    (cache,) = upstream.make_prompt_cache(small_models.make_llama())
    assert type(cache) is KVCache


def test_layers_with_caches_of_their_own_are_left_and_named(on):
    sliding = small_models.make_llama(
        num_hidden_layers=2,
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=8,
    )
    with heard() as lines:
        full, own = upstream.make_prompt_cache(sliding, 20)
    assert re.search("in 1 of 2 layers; .* others .*1 RotatingKVCache", lines[0])
    assert (full.max_size, full.keep, own.max_size, own.keep) == (20, 3, 8, 0)
    with heard() as lines:
        upstream.make_prompt_cache(small_models.make(), 20)
    assert re.search("has no effect.*2 CacheList", lines[0])


@pytest.mark.parametrize("size", [3, 2, 0, -1])
def test_windows_that_cannot_be_get_a_sentence(on, size):
    with pytest.raises(PolicyError, match="max_kv_size") as error:
        upstream.make_prompt_cache(small_models.make_llama(), size)
    assert "MLX_SINKS" in str(error.value)


def test_quantising_a_window_gets_a_sentence(on):
    model = small_models.make_llama()
    cache = upstream.make_prompt_cache(model, 20)
    with pytest.raises(PolicyError, match="leave out kv_bits or max_kv_size"):
        cache[0].to_quantized(group_size=64, bits=4)


def text_of(model, prompt, **options):
    return "".join(
        response.text
        for response in mlx_lm.stream_generate(
            model,
            mlx_lm.tokenizer_utils.TokenizerWrapper(small_models.tokenizer()),
            prompt,
            max_tokens=30,
            **options,
        )
    )


def test_modules_that_have_the_name_already_are_reached():
    """mlx_lm.generate imported make_prompt_cache long before install()."""
    model, prompt = small_models.make_llama(num_hidden_layers=2), [*range(60)]
    stock = text_of(model, prompt, max_kv_size=20)
    assert stock == text_of(model, prompt)
    for prefill in (7, 2048):
        with mlx_sinks.patched(SinkPolicy(sinks=3)):
            ours = text_of(model, prompt, max_kv_size=20, prefill_step_size=prefill)
        cache = mlx_sinks.make_sink_cache(model, 20, sinks=3)
        assert ours == text_of(model, prompt, prompt_cache=cache) != stock
    assert text_of(model, prompt, max_kv_size=20) == stock


def test_a_batch_gives_what_each_gives_alone(on):
    model = small_models.make_llama(num_hidden_layers=2)
    prompts = [tokens(n, length)[0].tolist() for n, length in enumerate((50, 9))]
    generator = BatchGenerator(model, max_tokens=25, prefill_step_size=16)
    caches = [upstream.make_prompt_cache(model, 20) for _ in prompts]
    uids = generator.insert(prompts, caches=caches)
    for prompt, together, left in zip(prompts, *run_out(generator, uids)):
        alone = mlx_sinks.make_sink_cache(model, 20, sinks=3)
        assert together == greedy(model, prompt, alone, 25)
        assert {cache.keep for cache in left} == {3}


def test_a_batch_generator_makes_windows_with_the_policys_sinks(on):
    generator = BatchGenerator(small_models.make_llama(), max_tokens=3, max_kv_size=20)
    generator.insert([tokens(0, 50)[0].tolist()])
    while not (found := [r for r in generator.next_generated() if r.finish_reason]):
        pass
    (cache,) = found[0].prompt_cache
    assert (type(cache), cache.max_size, cache.keep) == (RotatingKVCache, 20, 3)


def greedy(model, prompt, cache, count):
    inputs, found = mx.array([prompt]), []
    for _ in range(count):
        inputs = mx.argmax(model(inputs, cache=cache)[:, -1:], axis=-1)
        found.append(inputs.item())
    return found


def test_kept_tokens_survive_saving(on, tmp_path):
    model = small_models.make_llama(num_hidden_layers=2)
    cache, file = upstream.make_prompt_cache(model, 20), str(tmp_path / "c.safetensors")
    logits(model, tokens(1), 30, cache)
    upstream.save_prompt_cache(file, cache)
    loaded = upstream.load_prompt_cache(file)
    assert {layer.keep for layer in loaded} == {3}
    ours = logits(model, tokens(2), 8, loaded)
    np.testing.assert_array_equal(ours, logits(model, tokens(2), 8, cache))


def test_batches_of_another_kind_are_refused(on):
    batch = RotatingKVCache.merge([RotatingKVCache(20, keep=3)])
    for other in (
        RotatingKVCache.merge([RotatingKVCache(20)]),
        mlx_sinks.SinkCache.merge([mlx_sinks.SinkCache(20, 3)]),
        RotatingKVCache.merge([RotatingKVCache(20, keep=4)]),
    ):
        with pytest.raises(ValueError, match="one kind"):
            batch.extend(other)


# --------------------------------------------------------------------- self-check


def refused():
    with pytest.raises(PatchError) as error:
        mlx_sinks.install(targets=["rotating"])
    return str(error.value)


def test_an_upstream_that_evicts_otherwise_is_refused(monkeypatch):
    def drop_first(self, trim_size, v, append=None):
        kept = v[..., max(trim_size, 0) :, :]
        return kept if append is None else mx.concatenate([kept, append], axis=2)

    monkeypatch.setattr(RotatingKVCache, "_trim", drop_first)
    assert "a RotatingKVCache" in refused()


def test_another_maker_of_caches_is_refused(monkeypatch):
    def make_prompt_cache(model, max_kv_size=None):
        return [KVCache()]

    make_prompt_cache.__module__ = upstream.__name__
    monkeypatch.setattr(upstream, "make_prompt_cache", make_prompt_cache)
    assert "make_prompt_cache" in refused()


def test_the_line_is_said_when_a_window_is_made(capsys):
    mlx_sinks.install(SinkPolicy(sinks=5), targets=["rotating"])
    model = small_models.make_llama()
    for _ in range(2):
        upstream.make_prompt_cache(model, 20)
    (line,) = capsys.readouterr().err.splitlines()
    assert "llama: keeping 5 sinks in a window of 20 tokens, in 1 of 1 layers" in line


def test_apply_leaves_windows_alone():
    model = small_models.make()
    mlx_sinks.apply(model, SinkPolicy())
    with heard() as lines:
        upstream.make_prompt_cache(model, 20)
    assert lines == []
    assert not patch_of("rotating").is_on(sys.modules["mlx_lm.models.cache"])
