"""--max-kv-size on plain upstream commands: ignored, switched on, switched off."""

import mlx_lm
import pytest
from mlx_lm.models.cache import save_prompt_cache

import mlx_sinks
import small_models
from processes import command, generation, run

WINDOW, MAX_TOKENS = 24, 30
PROMPT = "The tide comes in and goes out again, twice a day, for reasons of its own."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    return small_models.write_llama_folder(
        path, num_hidden_layers=2, hidden_size=64, num_attention_heads=4
    )


def generate(folder, *more, before=(), window=WINDOW, **variables):
    if window is not None:
        more = ("--max-kv-size", window, *more)
    argv = generation(folder, PROMPT, MAX_TOKENS, "--verbose", "False", *more)
    return run(*before, command("mlx_lm.generate"), *argv, **variables)


def in_process(folder, sinks):
    """The text by a SinkCache; without a window for ``None``."""
    model, tokenizer = mlx_lm.load(str(folder))
    cache = None
    if sinks is not None:
        cache = mlx_sinks.make_sink_cache(model, WINDOW, sinks=sinks)
    text = mlx_lm.generate(
        model, tokenizer, PROMPT, max_tokens=MAX_TOKENS, prompt_cache=cache
    )
    return text + "\n"


@pytest.mark.parametrize(
    ("value", "sinks"), [("1", 4), ("sinks=2", 2), ("sinks=0,dsa=0", 0)]
)
def test_max_kv_size_is_a_window_with_the_policys_sinks(folder, value, sinks):
    outcome = generate(folder, MLX_SINKS=value)
    assert (outcome.status, outcome.stdout) == (0, in_process(folder, sinks))
    (line,) = outcome.ours
    kept = f"{sinks} sinks in a window of {WINDOW} tokens, in 2 of 2 layers"
    assert f"llama: keeping {kept}" in line
    assert outcome.theirs == generate(folder).stderr
    assert outcome.stdout != in_process(folder, None)


@pytest.mark.parametrize("off", ["0", "rotating=0", "sinks=8,rotating=off"])
def test_switched_off_it_is_stock(folder, off):
    stock = generate(folder)
    # llama has a make_cache: upstream overlooks the size.
    assert stock.stdout == in_process(folder, None)
    assert_stock(generate(folder, MLX_SINKS=off), stock, off != "0")


def assert_stock(outcome, stock, is_on=True):
    """Upstream's own text, and where the variable is on a line that says so."""
    assert (outcome.status, outcome.stdout) == (stock.status, stock.stdout)
    assert outcome.theirs == stock.stderr
    overlooked = f"its window of {WINDOW} tokens is overlooked by mlx-lm here"
    assert [overlooked in line for line in outcome.ours] == [True] * is_on


def test_without_a_size_nothing_is_changed(folder):
    outcome, stock = (
        generate(folder, window=None, **on) for on in ({"MLX_SINKS": "1"}, {})
    )
    assert (outcome.stdout, outcome.theirs) == (stock.stdout, stock.stderr)
    (line,) = outcome.ours
    assert "llama: nothing to do: it selects no keys and has no window (" in line


def test_run_keeps_what_is_switched_off(folder):
    before = (command("mlx-sinks"), "run", "--sinks", "2")
    outcome = generate(folder, before=before, MLX_SINKS="rotating=0")
    assert_stock(outcome, generate(folder))
    assert generate(folder, before=before).stdout == in_process(folder, 2)


@pytest.mark.parametrize(
    ("window", "more", "sentence"),
    [
        (4, (), "sinks=4 must be smaller than max_kv_size=4"),
        (0, (), "max_kv_size must be a whole number of tokens >= 1, not 0"),
        # Upstream quantises after thousands of tokens: it is refused before the first.
        (24, ("--kv-bits", "4"), "can't quantise a rotating window: leave out kv_bits"),
    ],
)
@pytest.mark.parametrize("value", ["1", "sinks=0"])
def test_what_cannot_be_ends_with_a_sentence(folder, window, more, sentence, value):
    if value == "sinks=0" and window == 4:
        pytest.skip("it can be")
    outcome = generate(folder, *more, window=window, MLX_SINKS=value)
    assert outcome.status != 0
    assert sentence in outcome.ours[-1]
    assert "Traceback" not in outcome.stderr
    assert outcome.stdout == ""


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    path = tmp_path_factory.mktemp("draft")
    return small_models.write_llama_folder(path, num_hidden_layers=1)


@pytest.mark.parametrize("drafts", [1, 4])
def test_beside_a_draft_model_it_is_the_same_window(folder, draft, drafts):
    """Upstream makes none there. One that lost evicted tokens writes other text."""
    more = ("--draft-model", draft, "--num-draft-tokens", drafts)
    outcome = generate(folder, *more, MLX_SINKS="1")
    assert (outcome.status, outcome.stdout) == (0, in_process(folder, 4))
    kept = f"keeping 4 sinks in a window of {WINDOW} tokens, in "
    assert [kept in line for line in outcome.ours] == [True, True]
    assert "in 1 of 1 layers" in outcome.ours[0]
    assert "in 2 of 2 layers" in outcome.ours[1]


def test_beside_a_draft_model_it_can_be_switched_off(folder, draft):
    stock, off = (
        generate(folder, "--draft-model", draft, **variables)
        for variables in ({}, {"MLX_SINKS": "rotating=0"})
    )
    assert (off.status, off.stdout) == (stock.status, stock.stdout)
    dropped = f"mlx-lm makes no window of {WINDOW} tokens beside a draft model"
    assert any(dropped in line for line in off.ours)


def test_a_draft_models_window_is_not_quantised_either(folder, draft):
    more = ("--draft-model", draft, "--kv-bits", "4")
    outcome = generate(folder, *more, MLX_SINKS="1")
    assert outcome.status != 0
    assert "can't quantise a rotating window" in outcome.ours[-1]
    assert outcome.stdout == ""


def test_a_model_without_plain_layers_is_told(tmp_path):
    folder = small_models.write_folder(tmp_path / "dsa")
    outcome = generate(folder, MLX_SINKS="1")
    assert outcome.status == 0
    (line,) = outcome.ours
    assert f"a window of {WINDOW} tokens has no effect (2 CacheList)" in line


def test_a_saved_sink_cache_is_loaded_by_the_plain_command(folder, tmp_path):
    model, tokenizer = mlx_lm.load(str(folder))
    cache = mlx_sinks.make_sink_cache(model, WINDOW)
    for response in mlx_lm.stream_generate(
        model, tokenizer, "Of tides. " * 5, max_tokens=1, prompt_cache=cache
    ):
        assert response.token >= 0
    file = tmp_path / "tides.safetensors"
    facts = {"model": str(folder), "tokenizer_config": "{}"}
    save_prompt_cache(str(file), cache, facts)
    expected = mlx_lm.generate(
        model, tokenizer, PROMPT, max_tokens=MAX_TOKENS, prompt_cache=cache
    )
    options = ("--prompt-cache-file", file)
    outcome = generate(folder, *options, window=None, MLX_SINKS="1")
    assert (outcome.status, outcome.stdout) == (0, expected + "\n")
