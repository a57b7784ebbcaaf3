"""Prompts compacted in mlx-lm's own commands: generate, speculative, the server."""

import copy
import gc
import random
import re
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import (
    ArraysCache,
    KVCache,
    LRUPromptCache,
    RotatingKVCache,
    make_prompt_cache,
)

import mlx_sinks
import small_models
from batches import run_out
from lines import heard
from mlx_sinks import SnapKV
from mlx_sinks.budgets.compact_cache import CompactCache
from mlx_sinks.patches import mlx_lm_snapkv
from processes import command, generation, run, serving_model

BUDGET, MAX_TOKENS = 24, 24
SETTING = f"kv_budget={BUDGET}"
FOX = "The quick brown fox jumps over the lazy dog. "
JUGS = "Pack my box with five dozen liquor jugs, said the wizard to the judge; "
SHORT, LONG, LONGER = FOX, 4 * FOX, 3 * JUGS + FOX


@dataclass(frozen=True)
class Model(small_models.Folder):
    """A llama's folder, and what it writes in this process."""

    model: object

    def written(self, prompt, **options):
        """What follows a prompt."""
        options |= self.options
        return mlx_lm.generate(self.model, self.tokenizer, prompt, **options)

    def after(self, prompt, caches):
        """What follows a prompt whose tokens but the last are in the caches."""
        *_, last = self.tokenizer.encode(prompt)
        return self.written([last], prompt_cache=caches)

    def compacted(self, prompt):
        """What follows where everything before the prompt's last token is compacted."""
        tokens = self.tokenizer.encode(prompt)[:-1]
        caches = mlx_sinks.compact_prompt_cache(self.model, tokens, budget=BUDGET)
        return self.after(prompt, caches)

    def is_a_tie(self, prompt, text):
        """Whether a text parts from ours where two cuts of the prompt's reading do."""
        by_cuts = {
            self.written(prompt, prefill_step_size=step) for step in (1, 5, 2048)
        }
        return len(by_cuts) > 1 and text in by_cuts

    def whole(self, prompt):
        caches = make_prompt_cache(self.model)
        self.model(mx.array([self.tokenizer.encode(prompt)[:-1]]), cache=caches)
        return self.after(prompt, caches)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = small_models.write_llama_folder(tmp_path_factory.mktemp("llama"))
    model, tokenizer = mlx_lm.load(str(folder))
    return Model(str(folder), tokenizer, MAX_TOKENS, model)


@pytest.fixture
def budget():
    with mlx_sinks.patched(mlx_sinks.SinkPolicy(kv_budget=BUDGET)) as reports:
        yield {report.target: report for report in reports}


def test_a_compacted_prompt_goes_on_otherwise_than_a_whole_one(llama):
    for prompt in (LONG, LONGER):
        assert llama.compacted(prompt) != llama.whole(prompt)
    assert llama.compacted(SHORT) == llama.whole(SHORT)


@pytest.mark.parametrize("step", [7, 64, 2048])
@pytest.mark.parametrize("prompt", [SHORT, LONG, LONGER])
def test_generation_compacts_what_precedes_the_last_token(llama, budget, prompt, step):
    caches = make_prompt_cache(llama.model)
    text = llama.written(prompt, prompt_cache=caches, prefill_step_size=step)
    assert text == llama.compacted(prompt)
    tokens = len(llama.tokenizer.encode(prompt)) - 1
    for cache in caches:
        assert isinstance(cache, CompactCache)
        generated = cache.offset - tokens
        held = tokens if prompt == SHORT else BUDGET
        assert cache.size() - generated == held


def test_generation_makes_its_caches_itself(llama, budget):
    assert llama.written(LONG) == llama.compacted(LONG)


def test_speculation_gives_the_same_text(llama, budget):
    for drafts in (1, 3):
        text = llama.written(LONG, draft_model=llama.model, num_draft_tokens=drafts)
        assert text == llama.compacted(LONG)


def test_later_turns_are_compacted_again(llama, budget):
    caches = make_prompt_cache(llama.model)
    for turn in (LONG, FOX, LONGER):
        before = caches[0].offset
        llama.written(turn, prompt_cache=caches)
        read = before + len(llama.tokenizer.encode(turn)) - 1
        for cache in caches:
            assert cache.size() - (cache.offset - read) == BUDGET


def batch(llama, prompts):
    return mlx_lm.batch_generate(
        llama.model,
        llama.tokenizer,
        [llama.tokenizer.encode(prompt) for prompt in prompts],
        return_prompt_caches=True,
        **llama.options,
    )


def test_a_batch_gets_the_text_of_each_alone(llama, budget):
    prompts = [SHORT, LONG, LONGER]
    answer = batch(llama, prompts)
    assert answer.texts == [llama.compacted(prompt) for prompt in prompts]
    for prompt, caches in zip(prompts, answer.caches):
        dropped = len(llama.tokenizer.encode(prompt)) - 1 - BUDGET
        assert {c.dropped for c in caches} == {0 if prompt == SHORT else dropped}


@pytest.mark.parametrize("step", [7, 2048])
def test_embeddings_count_as_tokens(llama, budget, step):
    tokens = mx.array(llama.tokenizer.encode(LONG))
    embeddings = llama.model.model.embed_tokens(tokens)
    for prompt in (tokens, tokens[:0]):
        caches = make_prompt_cache(llama.model)
        steps = generate_step(
            prompt,
            llama.model,
            max_tokens=2,
            input_embeddings=embeddings,
            prompt_cache=caches,
            prefill_step_size=step,
        )
        generated = len(list(steps))
        assert all(c.dropped == len(tokens) - 1 - BUDGET for c in caches)
        assert all(c.size() >= BUDGET + generated for c in caches)


def test_one_token_after_a_prompt_that_nobody_observed_warns(llama, budget):
    caches = make_prompt_cache(llama.model)
    tokens = llama.tokenizer.encode(LONG)
    llama.model(mx.array([tokens]), cache=caches)
    with heard() as lines:
        llama.written(tokens[-1:], prompt_cache=caches)
    assert "nothing was seen of its attention" in lines[0]


def test_one_token_alone_warns_of_nothing(llama, budget):
    with heard() as lines:
        llama.written([65])
        batch(llama, ["A", FOX])
    assert lines == []


def test_the_innermost_policy_decides(llama, budget):
    with mlx_sinks.patched():
        assert llama.written(LONG) == llama.whole(LONG)
        with mlx_sinks.patched(mlx_sinks.SinkPolicy(kv_budget=BUDGET)):
            assert llama.written(LONG) == llama.compacted(LONG)
    assert llama.written(LONG) == llama.compacted(LONG)


def test_a_model_is_freed_as_soon_as_nobody_has_it(llama, budget):
    model, _ = mlx_lm.load(llama.folder)
    gone = weakref.finalize(model, lambda: None)
    gc.collect()
    gc.disable()
    try:
        mlx_lm.generate(model, llama.tokenizer, LONG, max_tokens=2)
        mlx_sinks.compact_prompt_cache(model, [1] * 200, budget=8)
        del model
        assert not gone.alive
    finally:
        gc.enable()


def started(llama, prompts, **more):
    """A generator whose prompts are read, and the texts that it will have written."""
    generator = BatchGenerator(llama.model, max_tokens=MAX_TOKENS, **more)
    return generator, generator.insert([llama.tokenizer.encode(p) for p in prompts])


def test_a_budget_reaches_requests_that_join_others(llama):
    """What was generating before the budget stays whole, and nobody is disturbed."""
    expected = {}
    for policy in (mlx_sinks.SinkPolicy(), mlx_sinks.SinkPolicy(kv_budget=BUDGET)):
        with mlx_sinks.patched(policy):
            for prompt in (LONG, LONGER):
                tokens, _ = run_out(*started(llama, [prompt]))
                expected[prompt, policy.kv_budget] = tokens[0]
    generator, (first,) = started(llama, [LONG])
    for _ in range(3):
        before = [r.token for r in generator.next_generated()]
    with mlx_sinks.patched(mlx_sinks.SinkPolicy(kv_budget=BUDGET)):
        (second,) = generator.insert([llama.tokenizer.encode(LONGER)])
        (rest, joined), caches = run_out(generator, [first, second])
    assert expected[LONG, None][2:] == before + rest
    assert joined == expected[LONGER, BUDGET]
    lengths = [len(llama.tokenizer.encode(p)) for p in (LONG, LONGER)]
    for length, cache in zip(lengths, caches):
        assert {c.offset for c in cache} == {length + MAX_TOKENS}
    assert {c.dropped for c in caches[1]} == {lengths[1] - 1 - BUDGET}


def test_a_batch_with_nothing_to_read(llama, budget):
    """Caches trimmed to nothing, and a sequence that only its last token is new of."""
    whole = make_prompt_cache(llama.model)
    llama.model(mx.array([llama.tokenizer.encode(LONG)]), cache=whole)
    trimmed = copy.deepcopy(whole)
    for cache in trimmed:
        cache.trim(cache.offset)
    generator = BatchGenerator(llama.model, max_tokens=4)
    uids = generator.insert([[65], [65, 66]], caches=[trimmed, None])
    uids += generator.insert([llama.tokenizer.encode(LONGER)])
    _, caches = run_out(generator, uids)
    offsets = [1 + 4, 2 + 4, len(llama.tokenizer.encode(LONGER)) + 4]
    assert [{c.offset for c in cache} for cache in caches] == [{n} for n in offsets]


def test_layers_that_no_budget_reaches_are_named(llama, budget):
    with heard() as lines:
        caches = make_prompt_cache(llama.model, 64)
        llama.written(LONG, prompt_cache=caches)
    (line,) = lines
    assert re.search("of .* rows has no effect .* RotatingKVCache", line)


def test_quantised_caches_are_refused_with_a_sentence(llama, budget):
    with pytest.raises(mlx_sinks.PolicyError, match="leave out kv_bits or kv_budget"):
        llama.written(LONG, kv_bits=4)


def test_without_a_budget_generation_is_upstreams():
    names = {report.target for report in mlx_sinks.install()}
    assert "snapkv" not in names
    generate = sys.modules["mlx_lm.generate"]
    assert not hasattr(generate._extend_cache, "sinks_mark")


# ------------------------------------------------------------------ commands


def generated(llama, *words, prompt=LONG, **variables):
    argv = generation(llama.folder, prompt, MAX_TOKENS)
    return run(*map(str, words), *argv, **variables)


def test_the_variable_and_the_option_are_the_same(llama):
    option = command("mlx-sinks"), "run", "--kv-budget", BUDGET
    by_option = generated(llama, *option, "mlx_lm.generate")
    assert by_option.status == 0, by_option.stderr
    by_variable = generated(llama, command("mlx_lm.generate"), MLX_SINKS=SETTING)
    stock = generated(llama, command("mlx_lm.generate"))
    assert by_option.without_figures() == by_variable.without_figures()
    assert by_option.without_figures().stdout != stock.without_figures().stdout
    (line,) = by_option.ours
    kept = f"keeping 4 sinks of prompts compacted to {BUDGET} rows, in "
    assert line.startswith(f"mlx-sinks: llama: {kept}")


def test_a_short_prompt_is_not_touched(llama):
    words = command("mlx_lm.generate")
    ours = generated(llama, words, prompt="Why?", MLX_SINKS=SETTING)
    assert ours.status == 0, ours.stderr
    stock = generated(llama, words, prompt="Why?")
    assert ours.without_figures().stdout == stock.without_figures().stdout


@pytest.mark.parametrize("flags", ["-m mlx_lm.generate", "-u -mmlx_lm.generate"])
def test_a_module_run_as_a_script_is_refused(llama, flags):
    outcome = generated(llama, sys.executable, *flags.split(), MLX_SINKS=SETTING)
    assert outcome.status != 0
    (line,) = outcome.ours
    assert f"use MLX_SINKS={SETTING} mlx_lm.generate --model {llama.folder} " in line


def test_the_package_run_as_a_script_is_reached(llama):
    by_name = generated(
        llama, sys.executable, "-m", "mlx_lm", "generate", MLX_SINKS=SETTING
    )
    assert by_name.status == 0, by_name.stderr
    assert any("compacted to" in line for line in by_name.ours)


@pytest.mark.parametrize("value", ["0", "x", "-3", "1.5", ""])
def test_a_budget_that_cannot_be_gets_a_sentence(value):
    words = command("mlx-sinks"), "run", f"--kv-budget={value}", "true"
    outcome = run(*words)
    assert outcome.status == 2
    assert "kv_budget must be a whole number" in outcome.stderr
    with pytest.raises(mlx_sinks.PolicyError, match="kv_budget must be"):
        mlx_sinks.SinkPolicy.from_env({"MLX_SINKS": f"kv_budget={value}"})


# ---------------------------------------------------------------- the server


@pytest.fixture(scope="module")
def server(llama, tmp_path_factory):
    log = tmp_path_factory.mktemp("server")
    with serving_model(log, llama.folder, MLX_SINKS=SETTING) as running:
        yield running


def test_requests_at_once_are_each_compacted_alone(server, llama):
    prompts = [SHORT, LONG, LONGER, FOX + LONGER]
    texts = llama.complete_together(server, prompts)
    assert texts == [llama.compacted(prompt) for prompt in prompts]


def test_a_request_served_alone_is_compacted(server, llama):
    prompt = f"Alone. {LONG}"
    text, _ = llama.complete(server, prompt, seed=1)
    assert text == llama.compacted(prompt)


def test_a_conversation_goes_on_from_the_whole_prompt(server, llama):
    """The answer is read again: its keys were computed beside a compacted prompt."""
    prompt = JUGS + LONG
    text, _ = llama.complete(server, prompt)
    tokens = len(llama.tokenizer.encode(prompt))
    assert llama.complete(server, prompt) == (text, tokens - 1)
    longer = prompt + text + JUGS
    assert llama.complete(server, longer) == (llama.compacted(longer), tokens - 1)


@pytest.mark.parametrize(
    "words",
    [
        (command("mlx_lm.server"), "--kv-bits", "8"),
        (sys.executable, "-m", "mlx_lm.server", "--kv-bits=8"),
        (sys.executable, "-m", "mlx_lm", "server", "--kv-b", "4"),
    ],
    ids=lambda words: words[-1],
)
def test_a_server_with_quantised_caches_does_not_start(llama, words):
    outcome = run(*words, "--model", llama.folder, MLX_SINKS=SETTING)
    assert outcome.status != 0
    (line,) = outcome.ours
    assert "can't be quantised" in line and "Traceback" not in outcome.stderr
    assert f": MLX_SINKS={SETTING},snapkv=0 " in line
    assert line.endswith(f"--model {llama.folder}")


def conversations(llama, count, turns):
    """Prompts that extend one another by their answers, and each one's answer."""
    asked = [f"{number}. {(FOX, JUGS)[number % 2]}" for number in range(count)]
    answers = {}
    for _ in range(turns):
        for number, prompt in enumerate(asked):
            answers[prompt] = llama.compacted(prompt)
            asked[number] = f"{prompt}{answers[prompt]} And {number}? "
    return answers


@pytest.mark.parametrize("order", ["as asked", "longest first", "shuffled"])
def test_answers_do_not_depend_on_what_was_asked_before(llama, tmp_path, order):
    """A server whose store has whatever earlier requests left, eight at once."""
    answers = conversations(llama, count=10, turns=7)
    prompts = list(answers)
    if order == "longest first":
        prompts.reverse()
    elif order == "shuffled":
        random.Random(0).shuffle(prompts)
    running = serving_model(tmp_path, llama.folder, MLX_SINKS=SETTING)
    with running as server, ThreadPoolExecutor(8) as pool:
        asked = pool.map(lambda prompt: llama.complete(server, prompt), prompts)
        given = {prompt: text for prompt, (text, _) in zip(prompts, asked)}
    wrong = {
        prompt: text
        for prompt, text in given.items()
        if text != answers[prompt] and not llama.is_a_tie(prompt, text)
    }
    assert wrong == {}


def test_the_store_keeps_whole_prompts_and_no_compacted_answer(llama, budget):
    store = LRUPromptCache()
    prompt = llama.tokenizer.encode(LONG)
    caches, rest = store.fetch_nearest_cache("llama", prompt)
    assert (caches, rest) == (None, prompt)
    caches = make_prompt_cache(llama.model)
    text = llama.written(prompt, prompt_cache=caches)
    assert caches[0].dropped > 0
    store.insert_cache("llama", prompt + llama.tokenizer.encode(text), caches)
    assert len(store) == 1
    whole, rest = store.fetch_nearest_cache("llama", prompt)
    assert (whole[0].dropped, whole[0].size()) == (0, len(prompt) - 1)
    assert rest == prompt[-1:]
    # Of a prompt that parts sooner the newest queries are read again.
    other = prompt[:-20] + llama.tokenizer.encode("Why?")
    parted, rest = store.fetch_nearest_cache("llama", other)
    assert len(rest) == 1 + SnapKV(BUDGET).window_size
    assert parted[0].offset + len(rest) == len(other)
    text = llama.written(rest, prompt_cache=parted)
    assert text == llama.compacted(llama.tokenizer.decode(other))


def test_a_prompt_that_cannot_be_trimmed_is_not_read_twice(llama, budget):
    """Its layers have other caches too; the answer's queries weren't observed."""
    prompt = llama.tokenizer.encode(LONG)
    rows = make_prompt_cache(llama.model)
    llama.model(mx.array([prompt]), cache=rows)
    for more in ([], [ArraysCache(1)]):
        store = LRUPromptCache()
        store.insert_cache("llama", prompt, [CompactCache(rows[0]), *more])
        asked = [*prompt, 1, 2]
        fetched, rest = store.fetch_nearest_cache("llama", asked)
        if more:  # it is read anew
            assert (fetched, rest) == (None, asked)
        else:
            assert len(rest) > 2 and asked[fetched[0].offset :] == rest
        short = store.fetch_nearest_cache("llama", [*prompt[:40], 1])
        assert not more or short == (None, [*prompt[:40], 1])


def test_a_drafted_answer_is_stored_as_far_as_it_was_read(llama, budget):
    """Upstream counts a token that it wrote and didn't read."""
    store, prompt = LRUPromptCache(), llama.tokenizer.encode(SHORT)
    caches = make_prompt_cache(llama.model) + make_prompt_cache(llama.model)
    text = llama.written(prompt, draft_model=llama.model, prompt_cache=caches)
    key = prompt + llama.tokenizer.encode(text)
    store.insert_cache("llama", key, caches)
    fetched, rest = store.fetch_nearest_cache("llama", [*key, 5, 6])
    assert {cache.offset for cache in fetched} == {len(key) + 2 - len(rest)}


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("python -mmlx_lm server --kv-bits=4", True),
        ("python -W ignore -m mlx_lm.server --model x --kv-bi 8", True),
        ("python /bin/mlx_lm.server --kv-b=8", True),
        ("python /bin/mlx_lm.server --kv-group-size 32", False),
        ("python other.py --compare mlx_lm.server --kv-bits 8", False),
        ("python other.py mlx_lm server --kv-bits 8", False),
        ("python -c pass mlx_lm.server --kv-bits", False),
        ("python", False),
    ],
)
def test_which_commands_start_a_server_with_quantised_caches(words, refused):
    assert mlx_lm_snapkv._is_server_with_kv_bits(words.split()) == refused


def test_windows_that_drafts_are_verified_with_are_not_stored(llama, budget):
    store, tokens = LRUPromptCache(), llama.tokenizer.encode(LONG)
    store.fetch_nearest_cache("llama", tokens)
    model = small_models.make_llama(num_hidden_layers=2)
    caches = [KVCache(), RotatingKVCache(64), KVCache(), RotatingKVCache(64)]
    mlx_lm.generate(
        model,
        llama.tokenizer,
        tokens,
        max_tokens=3,
        draft_model=model,
        prompt_cache=caches,
    )
    assert caches[0].dropped > 0
    assert [type(cache) for cache in caches[1::2]] == [RotatingKVCache] * 2
    assert len(store) == 0


def test_what_another_prompt_fetched_is_not_stored_for_this_one(llama, budget):
    store = LRUPromptCache()
    store.fetch_nearest_cache("llama", llama.tokenizer.encode(LONGER))
    llama.written(LONG)
    assert len(store) == 0


@pytest.mark.parametrize("drafts", [1, 3])
def test_beside_a_draft_model_the_system_prompt_is_reused(llama, tmp_path, drafts):
    more = ("--draft-model", llama.folder, "--num-draft-tokens", str(drafts))
    with serving_model(tmp_path, llama.folder, *more, MLX_SINKS=SETTING) as running:
        shared = len(llama.tokenizer.encode(LONG))
        first, second = (f"{LONG}{question}" for question in (JUGS, FOX[::-1]))
        assert llama.complete(running, first) == (llama.compacted(first), 0)
        assert llama.complete(running, second) == (llama.compacted(second), shared)
