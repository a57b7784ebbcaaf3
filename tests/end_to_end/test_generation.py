"""Upstream's ways of generating, past index_topk, with the guarantee on."""

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator, speculative_generate_step
from mlx_lm.models.cache import (
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

import mlx_sinks
import small_models
from batches import alone_tokens, batch_tokens
from mlx_sinks import SinkPolicy
from small_models import tokens as prompt

POLICY = SinkPolicy(4, 6)
NEW_TOKENS = 24
# Short of index_topk (16) and past it, so that batches are ragged.
LENGTHS = (5, 40, 23, 61)


@pytest.fixture(params=[*small_models.KINDS, "glm_moe_dsa shared"])
def model(request):
    mlx_sinks.install(POLICY)
    kind, *shared = request.param.split()
    facts = small_models.glm52(7) if shared else {}
    return small_models.make(kind, seed=3, **facts)


def alone(model, prompt, count=NEW_TOKENS, cache=None, **options):
    return alone_tokens(model, prompt, cache, count, **options)


def drain(generator, results):
    """One round of a batch generator; False once all are done."""
    responses = generator.next_generated()
    for response in responses:
        results[response.uid].append(response.token)
    return bool(responses)


@pytest.mark.parametrize("step", [7, 512])
def test_a_ragged_batch_equals_its_prompts_alone(model, step, selections):
    prompts = [prompt(seed, length) for seed, length in enumerate(LENGTHS)]
    expected = [alone(model, p) for p in prompts]
    selections.clear()
    got, _ = batch_tokens(model, prompts, None, NEW_TOKENS, prefill_step_size=step)
    assert got == expected
    assert any(B == len(LENGTHS) and L == 1 for B, L, _ in selections)


def test_sequences_that_join_and_leave(model):
    """The longest joins first and the shortest leaves first."""
    order = [(61, 30), (5, 8), (40, 20), (23, 12)]
    prompts = [prompt(seed, length) for seed, (length, _) in enumerate(order)]
    counts = [count for _, count in order]
    expected = [alone(model, p, n) for p, n in zip(prompts, counts)]
    generator = BatchGenerator(model, prefill_step_size=9)
    results = {}
    for p, count in zip(prompts, counts):
        results |= {uid: [] for uid in generator.insert([p], [count])}
        for _ in range(4):
            drain(generator, results)
    while drain(generator, results):
        pass
    generator.close()
    assert list(results.values()) == expected


def test_a_sequence_removed_by_hand(model):
    prompts = [prompt(seed, length) for seed, length in enumerate(LENGTHS)]
    expected = [alone(model, p) for p in prompts]
    generator = BatchGenerator(model, max_tokens=NEW_TOKENS)
    results = {uid: [] for uid in generator.insert(prompts)}
    gone = list(results)[3]
    for _ in range(5):
        drain(generator, results)
    generator.remove([gone])
    while drain(generator, results):
        pass
    generator.close()
    results.pop(gone)
    assert list(results.values()) == expected[:3]


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prefill_step_sizes(model, chunk):
    p = prompt(1, 50)
    assert alone(model, p, prefill_step_size=chunk) == alone(model, p)


@pytest.mark.parametrize("taken_back", [1, 13, 45])
def test_a_trimmed_cache_continues_as_a_fresh_one(model, taken_back):
    p = prompt(2, 50)
    cache = make_prompt_cache(model)
    alone(model, [*p, *prompt(9, 10)], 4, cache=cache)
    kept = len(p) - taken_back
    assert trim_prompt_cache(cache, cache[0][0].offset - kept)
    assert alone(model, p[kept:], cache=cache) == alone(model, p)


def test_a_cache_of_several_turns(model):
    turns = [prompt(seed, 20) for seed in range(3)]
    cache, history = make_prompt_cache(model), []
    for turn in turns:
        answer = alone(model, turn, 6, cache=cache)
        history += turn
        assert answer == alone(model, history, 6)
        # The last token answered is not in the cache yet.
        trim_prompt_cache(cache, cache[0][0].offset - len(history))


@pytest.mark.parametrize("saved_by", ["stock", "ours"])
def test_a_saved_prompt_cache(model, saved_by, tmp_path):
    """Short of index_topk stock's cache and ours are the same, and stay so on disk."""
    p = prompt(4, 12)
    expected = alone(model, p + prompt(5, 30))
    if saved_by == "stock":
        mlx_sinks.uninstall()
    cache = make_prompt_cache(model)
    alone(model, p, 0, cache=cache)
    trim_prompt_cache(cache, cache[0][0].offset - len(p))
    file = str(tmp_path / "prompt.safetensors")
    try:
        save_prompt_cache(file, cache)
    except ValueError as error:
        assert saved_by == "ours" or "empty array" in str(error)
        pytest.skip("mlx before 0.32 can't save stock's empty values either")
    mlx_sinks.install(POLICY)
    assert alone(model, prompt(5, 30), cache=load_prompt_cache(file)) == expected


@pytest.mark.parametrize("drafts", [2, 5])
def test_speculative_decoding(model, drafts):
    """Several tokens a call, and rejected ones trimmed from both caches."""
    p = prompt(6, 45)
    draft_model = small_models.make(seed=8)
    steps = speculative_generate_step(
        mx.array(p), model, draft_model, num_draft_tokens=drafts, max_tokens=NEW_TOKENS
    )
    assert [token for token, _, _ in steps] == alone(model, p)


def test_the_guarantee_changes_what_stock_generates(model):
    """Else the tests above would compare stock with itself."""
    prompts = [prompt(seed, 60) for seed in range(4)]
    ours = [alone(model, p) for p in prompts]
    mlx_sinks.uninstall()
    assert ours != [alone(model, p) for p in prompts]
