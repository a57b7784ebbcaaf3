"""SinkCache against NumPy: what is seen, from where, and in whose company."""

import copy
import functools

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm import stream_generate
from mlx_lm.generate import generate_step
from mlx_lm.models import internlm3, llama
from mlx_lm.models.cache import (
    RotatingKVCache,
    can_trim_prompt_cache,
    load_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from mlx_lm.models.rope_utils import Llama3RoPE, SuScaledRoPE, YarnRoPE

import small_models
import window_oracle
from batch_histories import hold
from batches import alone_tokens, batch_tokens, batched_turns
from lines import heard
from mlx_sinks import BatchSinkCache, SinkCache, make_sink_cache
from mlx_sinks.windows import positions
from window_streams import (
    HEADS,
    NOISE,
    WIDTH,
    WindowHistory,
    check,
    check_rows,
    feed,
    stream,
)

MODES = ("absolute", "local")
ROPES = {
    "default": lambda: nn.RoPE(WIDTH),
    "linear": lambda: nn.RoPE(WIDTH, scale=0.5),
    "traditional": lambda: nn.RoPE(WIDTH, traditional=True),
    "partial": lambda: nn.RoPE(WIDTH // 2, base=500.0),
    "partial traditional": lambda: nn.RoPE(WIDTH // 2, traditional=True, scale=0.25),
    "base": lambda: nn.RoPE(WIDTH, base=500000.0),
    "llama3": lambda: Llama3RoPE(
        WIDTH,
        scaling_config={
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "yarn": lambda: YarnRoPE(
        WIDTH, scaling_factor=4.0, original_max_position_embeddings=64
    ),
    "yarn traditional partial": lambda: YarnRoPE(
        WIDTH // 2,
        traditional=True,
        scaling_factor=16.0,
        original_max_position_embeddings=64,
    ),
    "su": lambda: SuScaledRoPE(
        WIDTH,
        max_position_embeddings=512,
        original_max_position_embeddings=64,
        long_factor=[1.0 + 0.5 * i for i in range(WIDTH // 2)],
    ),
    "su partial": lambda: SuScaledRoPE(
        WIDTH // 2,
        max_position_embeddings=512,
        original_max_position_embeddings=64,
        long_factor=2.0,
    ),
}
SCALINGS = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def make_model(layers=2, seed=0, **facts):
    shape = dict(
        hidden_size=HEADS * 2 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=2 * HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=512,
    )
    return small_models.make_llama(seed, **{**shape, **facts})


@functools.cache
def model_of_one_layer():
    return make_model(layers=1)


def make_cache(window, sinks, rope=None):
    """A single cache: in "local" mode for a ``rope``, in "absolute" without."""
    if rope is None:
        return SinkCache(window, sinks=sinks)
    model = model_of_one_layer()
    model.layers[0].self_attn.rope = rope
    return make_sink_cache(model, window, sinks=sinks, position_mode="local")[0]


def rope_of(mode):
    return nn.RoPE(WIDTH, base=100.0) if mode == "local" else None


def facts(cache):
    return (cache.offset, cache.size(), cache.evictions, cache.empty(), cache.nbytes)


def cuts_of(total, chunk):
    return [chunk] * (total // chunk) + [total % chunk] * (total % chunk > 0)


def tokens(seed, length):
    return mx.array(np.random.default_rng(seed).integers(0, 256, length))


def expected_logits(model, inputs, window, sinks):
    """No cache, but a mask that says what is seen."""
    mask = mx.array(window_oracle.visible(len(inputs), window, sinks))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama, "create_attention_mask", lambda *_, **__: mask)
        return np.array(model(inputs[None])[0])


def expected_greedy(model, prompt, count, window, sinks):
    inputs = list(prompt)
    for _ in range(count):
        last = expected_logits(model, mx.array(inputs), window, sinks)[-1]
        inputs.append(int(last.argmax()))
    return inputs[len(prompt) :]


def logits(model, inputs, cuts, cache):
    parts, start = [], 0
    for cut in cuts:
        parts.append(np.array(model(inputs[None, start : start + cut], cache)[0]))
        mx.eval([layer.state for layer in cache])
        start += cut
    return np.concatenate(parts)


@pytest.mark.parametrize("name", ROPES)
def test_the_oracle_rotates_as_upstream(name):
    rope, x = ROPES[name](), stream(0, 9)[0]
    ours = window_oracle.rotate(x, range(40, 49), rope)
    upstream = np.array(rope(mx.array(x[None]), offset=40))[0]
    np.testing.assert_allclose(ours, upstream, **NOISE)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_each_query_sees_the_sinks_and_the_newest(data):
    window = data.draw(st.integers(1, 24), "window")
    sinks = data.draw(st.integers(0, window - 1), "sinks")
    cuts = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=12), "cuts")
    mode = data.draw(st.sampled_from(MODES), "mode")
    rope = rope_of(mode)
    cache, seen = make_cache(window, sinks, rope), 0
    whole = stream(len(cuts), sum(cuts))
    for cut in cuts:
        seen = check(cache, whole, [cut], window, sinks, rope, seen)
        assert cache.size() == min(seen, window)
        assert cache.evictions == max(0, seen - window)
        assert copy.deepcopy(cache).is_trimmable() == (seen <= window)
        if mode == "absolute":
            assert (cache.offset, cache.rotations) == (seen, 0)


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_logits_do_not_depend_on_the_chunks(chunk, sinks):
    model, inputs = make_model(), tokens(0, 600)
    expected = expected_logits(model, inputs, 48, sinks)
    cache = make_sink_cache(model, 48, sinks=sinks)
    assert [type(layer) for layer in cache] == [SinkCache] * 2
    ours = logits(model, inputs, cuts_of(600, chunk), cache)
    np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=2e-4)


@settings(max_examples=10, deadline=None)
@given(
    st.integers(5, 80), st.lists(st.integers(1, 90), min_size=1, max_size=8), st.data()
)
def test_logits_do_not_depend_on_random_cuts(window, cuts, data):
    sinks = data.draw(st.integers(0, window - 1))
    model, inputs = make_model(), tokens(1, sum(cuts))
    ours = logits(model, inputs, cuts, make_sink_cache(model, window, sinks=sinks))
    expected = expected_logits(model, inputs, window, sinks)
    np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_the_keys_keep_their_dtype(mode, dtype):
    cache, rope = make_cache(8, 2, rope_of(mode)), rope_of(mode)
    for length in (5, 1, 9, 1, 1):
        x = mx.random.normal((1, HEADS, length, WIDTH)).astype(dtype)
        rotated = x if rope is None else rope(x, offset=cache.offset)
        keys, values = cache.update_and_fetch(rotated, x)
        assert (keys.dtype, values.dtype) == (dtype, dtype)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cuts", [[12], [1] * 12, [7, 5]])
def test_full_evicts_nothing_and_one_more_evicts_one(mode, cuts):
    rope, whole = rope_of(mode), stream(2, 20)
    cache = make_cache(12, 4, rope)
    assert cache.empty() and cache.size() == 0 and cache.evictions == 0
    seen = check(cache, whole, cuts, 12, 4, rope)
    assert (cache.evictions, cache.size(), cache.rotations) == (0, 12, 0)
    assert copy.deepcopy(cache).is_trimmable() and not cache.empty()
    seen = check(cache, whole, [1], 12, 4, rope, seen)
    assert (cache.evictions, cache.size()) == (1, 12)
    assert not cache.is_trimmable()
    check(cache, whole, [5], 12, 4, rope, seen)
    assert (cache.evictions, cache.size()) == (6, 12)
    assert type(cache.evictions) is type(cache.rotations) is type(cache.offset) is int
    assert (cache.rotations > 0) == (mode == "local")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seen", [0, 2, 12, 30])
def test_an_empty_call_changes_nothing(mode, seen):
    rope, whole = rope_of(mode), stream(3, 50)
    cache = make_cache(12, 4, rope)
    check(cache, whole, [seen] * (seen > 0), 12, 4, rope)
    before = facts(cache)
    nothing = mx.zeros((1, HEADS, 0, WIDTH))
    cache.update_and_fetch(nothing, nothing)
    assert facts(cache) == before
    check(cache, whole, [1, 3, 1, 8, 1], 12, 4, rope, seen)


@pytest.mark.parametrize("mode", MODES)
def test_mask_as_an_array(mode):
    rope, whole = rope_of(mode), stream(4, 60)
    cache, seen = make_cache(12, 4, rope), 0
    for cut in (3, 5, 4, 2, 20, 7):
        plain, array = cache.make_mask(cut), cache.make_mask(cut, return_array=True)
        assert array.dtype == mx.bool_
        columns = array.shape[-1]
        seen = check(cache, whole, [cut], 12, 4, rope, seen)
        np.testing.assert_array_equal(
            np.broadcast_to(window_oracle.shown(plain, cut, columns), array.shape),
            np.array(array),
        )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("window", [16, 400])
def test_bytes_are_bounded_by_the_window(mode, window):
    rope, whole = rope_of(mode), stream(5, 2700)
    cache, token = make_cache(window, 4, rope), 2 * HEADS * WIDTH * 4
    assert cache.nbytes == 0
    start, held = 0, []
    for cut in (10, 2000, 1, 1, 500, 1, 20, *[1] * 100):
        feed(cache, whole, start, start + cut, rope)
        start += cut
        held.append(cache.nbytes)
    assert held[0] >= 10 * token
    assert all(window * token <= now <= 3 * window * token for now in held[1:])


@pytest.mark.parametrize("mode", MODES)
def test_a_long_step_is_not_held_in_memory(mode):
    cache = make_cache(16, 4, rope_of(mode))
    mx.eval(cache.update_and_fetch(*[mx.zeros((1, HEADS, 8, WIDTH))] * 2))
    mx.eval(cache.state)
    before = mx.get_active_memory()
    x = mx.random.normal((1, HEADS, 8192, WIDTH))
    keys, values = cache.update_and_fetch(x, x + 1)
    mx.eval(keys, values)
    mx.eval(cache.state)
    del x, keys, values
    assert mx.get_active_memory() - before < 8192 * HEADS * WIDTH * 4 / 2


@pytest.mark.parametrize("cuts", [[1], [2, 1], [3, 40, 1, 1], [100, 1, 30], [7] * 6])
@pytest.mark.parametrize("mode", MODES)
def test_turns_of_one_generation(mode, cuts):
    """Prompts that are shorter than the sinks and longer than the window."""
    rope, whole = rope_of(mode), stream(6, sum(cuts) + 3 * len(cuts))
    cache, seen = make_cache(16, 4, rope), 0
    for cut in cuts:
        seen = check(cache, whole, [cut, 1, 1, 1], 16, 4, rope, seen)


@pytest.mark.parametrize("prefill", [3, 64])
def test_generate_step_over_two_turns(prefill):
    model = make_model()
    cache = make_sink_cache(model, 16)
    seen = []
    for turn, length in enumerate((40, 3)):
        prompt = tokens(10 + turn, length)
        ours = alone_tokens(model, prompt, cache, 8, prefill_step_size=prefill)
        seen += prompt.tolist()
        assert ours == expected_greedy(model, seen, 8, 16, 4)
        seen += ours
        assert cache[0].offset == len(seen)


def test_stream_generate():
    model, tokenizer = make_model(), small_models.tokenizer()
    text = "Attention sinks stay alive, and the newest tokens too."
    cache = make_sink_cache(model, 20, sinks=2)
    responses = stream_generate(
        model, tokenizer, text, max_tokens=12, prompt_cache=cache
    )
    ours = [response.token for response in responses]
    expected = expected_greedy(model, tokenizer.encode(text), len(ours), 20, 2)
    assert ours == expected and len(ours) > 1


@pytest.mark.parametrize("name", ROPES)
def test_local_equals_rotating_everything_at_each_step(name):
    rope, whole, window, sinks = ROPES[name](), stream(7, 400), 20, 4
    cache, kept = make_cache(window, sinks, rope), []
    for p in range(400):
        kept.append(p)
        if len(kept) > window:
            del kept[sinks]
        q, k, v = whole
        expected = window_oracle.naive_step(q[:, [p]], k[:, kept], v[:, kept], rope)
        np.testing.assert_allclose(
            feed(cache, whole, p, p + 1, rope), expected, **NOISE
        )
    assert cache.evictions == 380


@pytest.mark.parametrize("name", ROPES)
def test_local_steps_of_several_tokens(name):
    rope, cuts = ROPES[name](), [3, 30, 1, 7, 64, 1, 1, 20, 5, 1]
    cache = make_cache(20, 4, rope)
    check(cache, stream(8, sum(cuts)), cuts, 20, 4, rope)


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("name", SCALINGS)
def test_local_models_equal_the_naive_window(name, traditional, monkeypatch):
    scaling = SCALINGS[name]
    model = make_model(rope_scaling=scaling, rope_traditional=traditional)
    inputs = tokens(2, 120)
    cache = make_sink_cache(model, 16, position_mode="local")
    ours = logits(model, inputs, [1] * 120, cache)
    rope = model.layers[0].self_attn.rope

    def naive(queries, keys, values, **_):
        out = window_oracle.naive_step(np.array(queries[0]), keys[0], values[0], rope)
        return mx.array(out[None].astype(np.float32))

    monkeypatch.setattr(llama, "scaled_dot_product_attention", naive)
    for layer in model.layers:
        layer.self_attn.rope = lambda x, offset=0: x
    windows = [window_oracle.NaiveWindow(16, 4) for _ in model.layers]
    expected = [np.array(model(token[None, None], windows)[0, 0]) for token in inputs]
    np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=5e-4)


def test_local_equals_absolute_until_the_first_eviction():
    model, inputs = make_model(), tokens(3, 30)
    ours, plain = (
        logits(
            model, inputs, [20, 1, 9], make_sink_cache(model, 30, position_mode=mode)
        )
        for mode in ("local", "absolute")
    )
    np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["default", "yarn", "su partial"])
@pytest.mark.parametrize("cuts", [[1] * 200, [7] * 30, [30, 1, 1, 12, 1] * 5])
def test_local_positions_stay_bounded(name, cuts, monkeypatch):
    monkeypatch.setattr(positions, "REBASE_AT", 40)
    rope, whole = ROPES[name](), stream(9, sum(cuts))
    cache, seen = make_cache(12, 4, rope), 0
    for cut in cuts:
        seen = check(cache, whole, [cut], 12, 4, rope, seen)
        assert cache.offset <= 40
    assert cache.evictions == seen - 12


def test_local_positions_at_the_real_bound():
    """Float32 angles of upstream's RoPE are off by a thousandth out there."""
    rope, (q, k, v), window = ROPES["default"](), stream(21, 16600), 64
    cache, bound = make_cache(window, 4, rope), positions.REBASE_AT
    assert bound == 16384
    for start in range(0, 16300, 100):
        x, y = (mx.array(part[None, :, start : start + 100]) for part in (k, v))
        cache.update_and_fetch(rope(x, offset=cache.offset), y)
        mx.eval(cache.state)
    for p in range(16300, 16600):
        ours = feed(cache, np.stack((q, k, v)), p, p + 1, rope)
        assert cache.offset <= bound
        kept = [*range(4), *range(p + 5 - window, p + 1)]
        expected = window_oracle.naive_step(q[:, [p]], k[:, kept], v[:, kept], rope)
        np.testing.assert_allclose(ours, expected, rtol=5e-3, atol=5e-3)


def test_local_positions_of_a_window_wider_than_the_bound(monkeypatch):
    monkeypatch.setattr(positions, "REBASE_AT", 8)
    rope, whole = ROPES["default"](), stream(10, 150)
    cache, seen = make_cache(12, 4, rope), 0
    for _ in range(150):
        seen = check(cache, whole, [1], 12, 4, rope, seen)
        assert cache.offset <= 24


def test_local_positions_of_a_batch_stay_bounded(monkeypatch):
    monkeypatch.setattr(positions, "REBASE_AT", 40)
    rope, wholes = ROPES["yarn"](), [stream(seed, 200) for seed in range(3)]
    rows = [[whole, 0] for whole in wholes]
    for row, start in zip(rows, (2, 25, 39)):
        row.append(make_cache(12, 4, rope))
        row[1] = check(row[2], row[0], [start], 12, 4, rope)
    batch = SinkCache.merge([row.pop() for row in rows])
    for _ in range(100):
        check_rows(batch, rows, [1, 1, 1], 12, 4, rope=rope)
        assert max(batch.offset.tolist()) <= 40
    check(batch.extract(1), *rows[1][:1], [1, 1], 12, 4, rope, rows[1][1])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [0, 1, 3, 10, 50])
def test_trim_forgets_the_newest(mode, n):
    rope, whole, other = rope_of(mode), stream(11, 60), stream(12, 60)
    cache = make_cache(12, 4, rope)
    check(cache, whole, [7, 1, 2], 12, 4, rope)
    assert cache.is_trimmable() and cache.trim(n) == min(n, 10)
    left = 10 - min(n, 10)
    assert (cache.size(), cache.evictions) == (left, 0)
    assert cache.offset == left
    other[:, :, :left] = whole[:, :, :left]
    check(cache, other, [1, 4, 1, 9, 1, 1], 12, 4, rope, left)


@pytest.mark.parametrize("mode", MODES)
def test_trim_of_a_full_window(mode):
    rope, whole = rope_of(mode), stream(13, 40)
    cache = make_cache(12, 4, rope)
    check(cache, whole, [12], 12, 4, rope)
    assert cache.trim(12) == 12 and cache.size() == 0
    check(cache, whole, [1] * 20, 12, 4, rope)


@pytest.mark.parametrize("mode", MODES)
def test_trim_after_an_eviction_is_refused(mode):
    rope, whole = rope_of(mode), stream(14, 40)
    cache = make_cache(12, 4, rope)
    check(cache, whole, [13], 12, 4, rope)
    before = facts(cache)
    for n in (1, 5, 100):
        with pytest.raises(ValueError, match=r"\w+ \w+ \w+"):
            cache.trim(n)
    assert not can_trim_prompt_cache([cache])
    assert trim_prompt_cache([cache], 3) == 0
    assert facts(cache) == before
    check(cache, whole, [1, 5, 1], 12, 4, rope, 13)


def test_trim_of_a_model():
    model, inputs = make_model(), tokens(4, 60)
    cache = make_sink_cache(model, 24)
    logits(model, mx.concatenate([inputs[:10], tokens(5, 9)]), [19], cache)
    assert trim_prompt_cache(cache, 9) == 9
    ours = logits(model, inputs[10:], [1, 30, 19], cache)
    expected = expected_logits(model, inputs, 24, 4)[10:]
    np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("name", ["absolute", *ROPES])
@pytest.mark.parametrize("seen", [0, 3, 12, 13, 35])
def test_copied_and_loaded_caches_go_on(name, seen, tmp_path):
    rope = ROPES[name]() if name in ROPES else None
    whole, other = stream(15, 60), stream(16, 60)
    cache = make_cache(12, 4, rope)
    check(cache, whole, [seen - 1, 1] if seen else [], 12, 4, rope)
    path = str(tmp_path / "cache.safetensors")
    copied = copy.deepcopy(cache)
    save_prompt_cache(path, [cache, cache], {"name": name})
    (loaded, _), named = load_prompt_cache(path, return_metadata=True)
    assert type(loaded) is SinkCache and named == {"name": name}
    for twin in (copied, loaded):
        assert facts(twin)[:-1] == facts(cache)[:-1]
        assert twin.is_trimmable() == cache.is_trimmable()
        assert twin.rotations == cache.rotations
    for twin, content in ((copied, other), (loaded, whole), (cache, whole)):
        content[:, :, :seen] = whole[:, :, :seen]
        check(twin, content, [1, 4, 1, 13, 1], 12, 4, rope, seen)


@pytest.mark.parametrize("mode", MODES)
def test_loaded_caches_after_positions_started_again(mode, tmp_path, monkeypatch):
    monkeypatch.setattr(positions, "REBASE_AT", 40)
    rope, whole = rope_of(mode), stream(17, 200)
    cache = make_cache(12, 4, rope)
    for seen in range(100):
        check(cache, whole, [1], 12, 4, rope, seen)
    save_prompt_cache(str(tmp_path / "cache.safetensors"), [cache])
    (loaded,) = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    check(loaded, whole, [1] * 60 + [9, 1], 12, 4, rope, 100)


@pytest.mark.parametrize("seen", [0, 10, 50])
@pytest.mark.parametrize("mode", MODES)
def test_a_models_cache_is_saved_and_loaded(mode, seen, tmp_path):
    model, inputs = make_model(rope_scaling=SCALINGS["yarn"]), tokens(6, 80)
    cache = make_sink_cache(model, 16, position_mode=mode)
    if seen:
        logits(model, inputs[:seen], [seen], cache)
    save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
    loaded = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    ours, expected = (
        logits(model, inputs[seen:], [1] * 10 + [7, 1], layers)
        for layers in (loaded, cache)
    )
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_states_are_those_that_earlier_versions_saved(mode):
    """A window of 6 with 2 sinks, after 15 single tokens: 9 of them evicted."""
    rope, whole = rope_of(mode), stream(22, 30)
    cache = make_cache(6, 2, rope)
    check(cache, whole, [1] * 15, 6, 2, rope)
    columns, (_, k, v) = [0, 1, 14, 11, 12, 13], whole[:, None]
    keys, values = k[:, :, columns], v[:, :, columns]
    state = [[6, 2, 0, 0, 15, 0], keys, values]
    if rope is not None:
        freqs = 100.0 ** (np.arange(0, WIDTH, 2) / WIDTH)
        sinks = window_oracle.rotate(keys[:, :, :2], [0, 1], rope)
        moved = window_oracle.rotate(keys, [9, 10, *columns[2:]], rope)
        first, second = np.split(sinks, 2, axis=-1)
        quarters = np.concatenate([-second, first], axis=-1)
        originals = np.stack([sinks, quarters], axis=-2)
        state = [[6, 2, 1, 2 * 9, 15, 0], freqs, moved, values, originals]
    state = [mx.array(state[0]), *(mx.array(np.float32(x)) for x in state[1:])]
    assert len(cache.state) == len(state)
    for ours, expected in zip(cache.state, state):
        assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape)
        np.testing.assert_allclose(ours, expected, **NOISE)
    loaded = SinkCache.from_state(state)
    assert facts(loaded) == facts(cache) and loaded.rotations == cache.rotations
    check(loaded, whole, [1, 3, 1, 9, 1], 6, 2, rope, 15)


BAD_WINDOWS = [0, -1, 8.5, "8", True, None]


@pytest.mark.parametrize("window", BAD_WINDOWS, ids=repr)
def test_wrong_windows_are_refused(window):
    with pytest.raises(ValueError, match="window"):
        SinkCache(window, sinks=0)
    with pytest.raises(ValueError, match="window"):
        make_sink_cache(model_of_one_layer(), window, sinks=0)


@pytest.mark.parametrize("sinks", [-1, 8, 9, 1.5, "2", True, None], ids=repr)
def test_wrong_sinks_are_refused(sinks):
    with pytest.raises(ValueError, match="sinks"):
        SinkCache(8, sinks=sinks)
    for mode in MODES:
        with pytest.raises(ValueError, match="sinks"):
            make_sink_cache(model_of_one_layer(), 8, sinks=sinks, position_mode=mode)


def test_the_default_sinks_are_four():
    with pytest.raises(ValueError, match="sinks"):
        SinkCache(4)
    whole = stream(18, 30)
    check(SinkCache(5), whole, [20, 1, 1], 5, 4)


@pytest.mark.parametrize("mode", ["relative", "", None, 1], ids=repr)
def test_unknown_position_modes_are_refused(mode):
    with pytest.raises(ValueError, match="position_mode"):
        make_sink_cache(model_of_one_layer(), 8, position_mode=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seen", [5, 20])
def test_quantizing_is_refused(mode, seen):
    rope, whole = rope_of(mode), stream(19, 40)
    cache = make_cache(12, 4, rope)
    check(cache, whole, [seen], 12, 4, rope)
    before = facts(cache)
    with pytest.raises(ValueError, match=r"\w+ \w+ \w+"):
        cache.to_quantized(group_size=32, bits=4)
    assert facts(cache) == before
    check(cache, whole, [1, 4], 12, 4, rope, seen)


def test_kv_bits_are_refused_in_generation():
    model = make_model()
    cache = make_sink_cache(model, 16)
    with pytest.raises(ValueError):
        steps = generate_step(
            tokens(0, 5),
            model,
            prompt_cache=cache,
            kv_bits=4,
            quantized_kv_start=0,
        )
        next(steps)


def test_dynamic_ntk_is_refused_in_local_mode():
    model = make_model()
    rope = internlm3.DynamicNTKScalingRoPE(WIDTH)
    for layer in model.layers:
        layer.self_attn.rope = rope
    with pytest.raises(ValueError, match="DynamicNTKScalingRoPE"):
        make_sink_cache(model, 8, position_mode="local")


@pytest.mark.parametrize("mode", MODES)
def test_only_plain_layers_are_replaced(mode):
    model = make_model(
        layer_types=["full_attention", "sliding_attention"], sliding_window=8
    )
    with heard() as lines:
        cache = make_sink_cache(model, 16, position_mode=mode)
    assert "the window reaches 1 of 2 layers" in lines[0]
    assert [type(layer) for layer in cache] == [SinkCache, RotatingKVCache]
    assert np.isfinite(logits(model, tokens(0, 50), [20, 1, 29], cache)).all()


@pytest.mark.parametrize("mode", MODES)
def test_plain_models_give_no_warning(mode):
    with heard() as lines:
        make_sink_cache(make_model(), 16, position_mode=mode)
    assert lines == []


@pytest.mark.parametrize("mode", MODES)
def test_models_with_nothing_to_replace_are_refused(mode):
    with pytest.raises(ValueError, match=r"\w+ \w+ \w+"):
        make_sink_cache(small_models.make("deepseek_v32"), 16, position_mode=mode)


def check_facts(cache, seen, window, rope=None):
    assert type(cache) is SinkCache
    assert cache.size() == min(seen, window)
    assert cache.evictions == max(0, seen - window)
    assert cache.empty() == (seen == 0)
    assert type(cache.offset) is int
    if rope is None:
        assert cache.offset == seen


def check_alone(cache, row, cuts, window, sinks, rope=None):
    """A cache that left a batch: as if it had always been alone."""
    whole, seen = row
    check_facts(cache, seen, window, rope)
    return check(cache, whole, cuts, window, sinks, rope, seen)


POSITIONS = [("absolute", False), ("local", False), ("local", True)]


class SinkHistory(WindowHistory):
    def set_up(self, draw):
        self.window = draw(st.integers(1, 14), "window")
        self.sinks = draw(st.integers(0, self.window - 1), "sinks")
        mode, again = draw(st.sampled_from(POSITIONS), "mode, positions start again")
        self.rope, self.patch = rope_of(mode), pytest.MonkeyPatch()
        if again:
            self.patch.setattr(positions, "REBASE_AT", 10)

    def make(self):
        return make_cache(self.window, self.sinks, self.rope)

    def check_facts(self, cache, seen):
        check_facts(cache, seen, self.window, self.rope)

    def check_batch(self, batch, rows):
        assert [type(layer) for layer in batch] == [BatchSinkCache]

    def teardown(self):
        try:
            super().teardown()
        finally:
            self.patch.undo()


def test_ragged_batches_of_any_history():
    hold(SinkHistory, examples=60, steps=5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize(
    ("left", "lengths"),
    [
        (left, lengths)
        for left, more in ((False, ([16, 16, 16], [0, 1, 30])), (True, ([1, 2, 30],)))
        for lengths in ([3, 40, 12], [20, 17, 16], *more)
    ],
)
def test_empty_batches_are_filled_with_padding(left, lengths, chunk, mode):
    rope = rope_of(mode)
    batch = SinkCache.merge([make_cache(16, 4, rope) for _ in lengths])
    rows = [[stream(seed, 100), 0] for seed in range(3)]
    check_rows(batch, rows, lengths, 16, 4, chunk, rope, left=left)
    for _ in range(5):
        check_rows(batch, rows, [1, 1, 1], 16, 4, rope=rope)
    check_rows(batch, rows, [7, 9, 20], 16, 4, chunk, rope)
    check_rows(batch, rows, [1, 1, 1], 16, 4, rope=rope)
    for i, row in enumerate(rows):
        check_alone(batch.extract(i), row, [4, 1, 18], 16, 4, rope)


def test_caches_of_different_windows_do_not_merge():
    caches = [SinkCache(window) for window in (16, 12)]
    for cache, window in zip(caches, (16, 12)):
        check(cache, stream(20, 40), [14], window, 4)
    before = [facts(cache) for cache in caches]
    with pytest.raises(ValueError, match="window"):
        SinkCache.merge(caches)
    assert [facts(cache) for cache in caches] == before


def test_batches_refuse_what_they_cannot_hold():
    rows = [[stream(seed, 60), 0] for seed in range(2)]
    batch = SinkCache.merge([SinkCache(12) for _ in rows])
    check_rows(batch, rows, [20, 3], 12, 4)
    with pytest.raises(ValueError, match="window"):
        batch.extend(SinkCache.merge([SinkCache(16)]))
    with pytest.raises(ValueError, match=r"\w+ \w+ \w+"):
        batch.prepare(left_padding=[2, 0])
    check_rows(batch, rows, [1, 1], 12, 4)
    check_rows(batch, rows, [2, 9], 12, 4)


@pytest.mark.parametrize("seen", [[0, 5], [5, 0, 30]])
def test_empty_caches_merge_with_full_ones(seen):
    rows = [[stream(seed, 60), length] for seed, length in enumerate(seen)]
    caches = [SinkCache(12) for _ in rows]
    for cache, (whole, length) in zip(caches, rows):
        check(cache, whole, [length] * (length > 0), 12, 4)
    batch = SinkCache.merge(caches)
    check_rows(batch, rows, [1] * len(rows), 12, 4)
    check_rows(batch, rows, [1] * len(rows), 12, 4)


@pytest.mark.parametrize("mode", MODES)
def test_batches_leave_what_they_were_made_of_alone(mode):
    rope = rope_of(mode)
    rows = [[stream(seed, 60), 0] for seed in range(2)]
    caches = [make_cache(12, 4, rope) for _ in rows]
    for cache, row, cut in zip(caches, rows, (5, 20)):
        row[1] = check(cache, row[0], [cut], 12, 4, rope)
    ends = [row[1] for row in rows]
    batch = SinkCache.merge(caches)
    for _ in range(10):
        check_rows(batch, rows, [1, 1], 12, 4, rope=rope)
    for cache, row, end in zip(caches, rows, ends):
        check(cache, row[0], [1, 1, 3], 12, 4, rope, end)


def test_bytes_of_a_batch_are_bounded():
    token = 2 * HEADS * WIDTH * 4
    batch = SinkCache.merge([SinkCache(16) for _ in range(3)])
    rows = [[stream(seed, 3000), 0] for seed in range(3)]
    check_rows(batch, rows, [700, 5, 300], 16, 4)
    for _ in range(100):
        check_rows(batch, rows, [1, 1, 1], 16, 4)
        assert batch.nbytes <= 3 * 3 * 16 * token
    check_rows(batch, rows, [20, 700, 3], 16, 4, 100)
    assert batch.nbytes <= 3 * 3 * 16 * token


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("chunk", [1, 6, 64])
def test_ragged_logits_equal_those_alone(chunk, side):
    model, lengths = make_model(), [3, 50, 17]
    inputs = [tokens(seed, 90) for seed in range(3)]
    expected = [expected_logits(model, row, 16, 4) for row in inputs]
    caches = [make_sink_cache(model, 16) for _ in lengths]
    cache = [SinkCache.merge(list(layers)) for layers in zip(*caches)]
    pads = [50 - length for length in lengths]
    right = side == "right"
    padded = mx.stack(
        [
            mx.pad(row[:length], (0, pad) if right else (pad, 0))
            for row, length, pad in zip(inputs, lengths, pads)
        ]
    )
    for layer in cache:
        if right:
            layer.prepare(lengths=lengths, right_padding=pads)
        else:
            layer.prepare(left_padding=pads)
    parts = []
    for start in range(0, 50, chunk):
        parts.append(np.array(model(padded[:, start : start + chunk], cache)))
        mx.eval([layer.state for layer in cache])
    if right:
        for layer in cache:
            layer.finalize()
    got = np.concatenate(parts, axis=1)
    ours = [
        [*(row[:length] if right else row[50 - length :])]
        for row, length in zip(got, lengths)
    ]

    def decode(rows, steps):
        for _ in range(steps):
            last = mx.array([[int(inputs[i][len(ours[i])])] for i in rows])
            for i, row in zip(rows, np.array(model(last, cache))):
                ours[i].append(row[0])

    decode([0, 1, 2], 12)
    for layer in cache:
        layer.filter([2, 0])
    decode([2, 0], 10)
    alone = [layer.extract(0) for layer in cache]
    rest = inputs[2][len(ours[2]) :]
    ours[2] += [*logits(model, rest, cuts_of(len(rest), 11), alone)]
    decode([0], 0)
    for i, row in enumerate(ours):
        np.testing.assert_allclose(row, expected[i][: len(row)], rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("together", [1, 2, 8])
@pytest.mark.parametrize("prefill", [5, 64])
def test_batch_generator_gives_what_each_gives_alone_in_two_turns(prefill, together):
    model = make_model()
    alone = [make_sink_cache(model, 16) for _ in range(4)]
    caches = [make_sink_cache(model, 16) for _ in range(4)]
    prompts = [
        [tokens(4 * turn + i, n).tolist() for i, n in enumerate(lengths)]
        for turn, lengths in enumerate(((2, 40, 13, 21), (30, 1, 6, 17)))
    ]
    sizes = dict(prefill_batch_size=together, completion_batch_size=max(2, together))
    sizes["prefill_step_size"] = prefill
    for left in batched_turns(model, prompts, caches, alone, 10, **sizes):
        for cache, expected in zip(left, alone):
            assert [type(layer) for layer in cache] == [SinkCache] * 2
            for layer, other in zip(cache, expected):
                assert layer.offset == other.offset
                assert layer.evictions == other.evictions


@pytest.mark.parametrize("name", SCALINGS)
def test_batch_generator_in_local_mode(name):
    """Prompts that were read alone, then single tokens in company."""
    model = make_model(rope_scaling=SCALINGS[name])
    prompts = [tokens(40 + i, n) for i, n in enumerate((2, 40, 13))]
    caches, expected = [], []
    for prompt in prompts:
        cache = make_sink_cache(model, 16, position_mode="local")
        logits(model, prompt[:-1], [len(prompt) - 1], cache)
        caches.append(copy.deepcopy(cache))
        expected.append(alone_tokens(model, prompt[-1:], cache, 30))
    ours, _ = batch_tokens(model, [p[-1:].tolist() for p in prompts], caches, 30)
    assert ours == expected
