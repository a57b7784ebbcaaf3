"""Plain ``mlx_lm.generate`` with and without the variable, as a user runs it."""

import contextlib
import functools
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import mlx_lm
import pytest
from mlx_lm.models import deepseek_v32

import mlx_sinks
import releases
import small_models
from processes import command, generation, python, run, run_without_pth

INDEX_TOPK = 32
POLICY = mlx_sinks.SinkPolicy(sinks=4, recency=8)
ON = {"MLX_SINKS": "sinks=4,recency=8"}
PAST_TOPK = "The quick brown fox jumps over the lazy dog, who packs five dozen jugs."
SHORT_OF_TOPK = "The quick brown fox"
MAX_TOKENS = 12
MODELS = [(kind, bits) for kind in small_models.KINDS for bits in (None, 4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a model, written once."""

    @functools.cache
    def write(kind="deepseek_v32", bits=None) -> Path:
        path = tmp_path_factory.mktemp(f"{kind}-{bits}")
        return small_models.write_folder(path, kind, INDEX_TOPK, bits=bits)

    return write


def options(folder, prompt=PAST_TOPK, verbose=False):
    return generation(folder, prompt, MAX_TOKENS, "--verbose", verbose)


def generate(*arguments, **variables):
    return run(command("mlx_lm.generate"), *arguments, **variables)


def in_process(folder, policy, prompt=PAST_TOPK):
    """The text, by a patch that a program asks for; stock's with ``None``."""
    patch = mlx_sinks.patched(policy) if policy else contextlib.nullcontext()
    with patch:
        model, tokenizer = mlx_lm.load(str(folder))
        return mlx_lm.generate(model, tokenizer, prompt, max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module")
def stock(folder):
    """What the command writes where the variable is unset."""
    return generate(*options(folder()))


@pytest.fixture(scope="module")
def kept_by(folder):
    """What it writes for a kind of model where the variable is set."""
    return functools.cache(lambda *model: generate(*options(folder(*model)), **ON))


@pytest.fixture(scope="module")
def kept(kept_by):
    """The same for the kind that most tests use."""
    return kept_by("deepseek_v32", None)


# ------------------------------------------------------------------ unset or off


def test_unset_is_an_interpreter_without_our_pth(folder, stock):
    control = run_without_pth("mlx_lm.generate", *options(folder()))
    assert stock == control
    assert stock.status == 0
    assert stock.stdout.strip()


def test_unset_is_an_interpreter_without_our_pth_figures_aside(folder):
    arguments = options(folder("glm_moe_dsa"), verbose=True)
    unset = generate(*arguments)
    control = run_without_pth("mlx_lm.generate", *arguments)
    assert unset.without_figures() == control.without_figures()
    assert "tokens-per-sec" in unset.stdout


def test_off_is_unset(folder, stock):
    assert generate(*options(folder()), MLX_SINKS="0") == stock


# -------------------------------------------------------------------------- set


def test_one_line_says_what_is_kept_where(stock, kept):
    (line,) = kept.ours
    assert line.startswith("mlx-sinks: ")
    releases = {name: version(name) for name in ("mlx-sinks", "mlx-lm", "mlx")}
    for words in ("deepseek_v32: ", str(POLICY), *map(" ".join, releases.items())):
        assert words in line
    assert kept.theirs == stock.stderr


def test_quiet_silences_the_line_and_nothing_else(folder, stock, kept):
    quiet = generate(*options(folder()), **ON, MLX_SINKS_QUIET="1")
    assert (quiet.status, quiet.stdout) == (0, kept.stdout)
    assert quiet.stderr == stock.stderr


@pytest.mark.parametrize(("kind", "bits"), MODELS)
def test_past_index_topk_the_text_is_the_policys(folder, kept_by, kind, bits):
    path, kept = folder(kind, bits), kept_by(kind, bits)
    assert (kept.status, kept.stdout) == (0, in_process(path, POLICY) + "\n")
    assert kept.stdout != in_process(path, None) + "\n"
    assert len(kept.ours) == 1


def test_stock_past_index_topk_is_upstreams_own_text(folder, stock):
    assert stock.stdout == in_process(folder(), None) + "\n"


@pytest.mark.parametrize(("kind", "bits"), [MODELS[0], MODELS[-1]])
def test_short_of_index_topk_the_text_is_stocks(folder, kind, bits):
    path = folder(kind, bits)
    assert len(SHORT_OF_TOPK) + MAX_TOKENS <= INDEX_TOPK
    kept = generate(*options(path, SHORT_OF_TOPK), **ON)
    assert (kept.status, kept.stdout) == (
        0,
        in_process(path, None, SHORT_OF_TOPK) + "\n",
    )
    assert len(kept.ours) == 1


def test_python_m_mlx_lm_generate(folder, kept):
    module = run(sys.executable, "-m", "mlx_lm", "generate", *options(folder()), **ON)
    assert module == kept


def test_python_m_mlx_lm_dot_generate(folder, kept):
    module = run(sys.executable, "-m", "mlx_lm.generate", *options(folder()), **ON)
    assert module.status == 0
    # After upstream's note that this way of calling it is deprecated.
    assert module.stdout.split("\n", 1)[1] == kept.stdout
    assert module.ours == kept.ours


def test_mlx_sinks_run(folder, kept):
    beside = Path(sys.executable).parent
    outcome = run(
        command("mlx-sinks"),
        *("run", "--sinks", "4", "--recency", "8", "mlx_lm.generate"),
        *options(folder()),
        PATH=os.pathsep.join([str(beside), os.environ["PATH"]]),
    )
    assert outcome == kept


def test_a_missing_model_is_upstreams_own_error(tmp_path):
    arguments = options(tmp_path / "missing")
    kept, unset = generate(*arguments, **ON), generate(*arguments)
    assert kept == unset
    assert unset.status != 0
    assert "Traceback" in unset.stderr


# ----------------------------------------------------------------------- refused


def sentence(outcome):
    """The only line on stderr."""
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("mlx-sinks: ")
    return line


MALFORMED = (
    "sinks=-1",
    "sinks=x",
    "sinks=1.5",
    "foo=3",
    "sinks=4,sinks=5",
    "8",
    "sinks=",
    "sinks=4;recency=8",
)


@pytest.fixture(scope="module")
def refusals(folder):
    """What the command writes for each malformed value; two run at a time."""
    arguments = options(folder())
    with ThreadPoolExecutor(2) as pool:
        outcomes = pool.map(lambda v: generate(*arguments, MLX_SINKS=v), MALFORMED)
        return dict(zip(MALFORMED, outcomes))


@pytest.mark.parametrize("value", MALFORMED)
def test_a_malformed_value_ends_with_one_sentence(refusals, value):
    outcome = refusals[value]
    line = sentence(outcome)
    assert f'MLX_SINKS="{value}"' in line
    assert 'accepted: MLX_SINKS=1, MLX_SINKS=0 or MLX_SINKS="sinks=' in line
    assert outcome.status != 0
    assert outcome.stdout == ""


@pytest.mark.parametrize("sinks", [INDEX_TOPK, INDEX_TOPK + 8])
def test_sinks_that_fill_index_topk_are_refused_before_it_is_full(folder, sinks):
    outcome = generate(*options(folder(), SHORT_OF_TOPK), MLX_SINKS=f"sinks={sinks}")
    line = outcome.stderr.splitlines()[-1]
    assert line.startswith("mlx-sinks: ")
    assert f"sinks={sinks} " in line
    assert f"index_topk={INDEX_TOPK}" in line
    assert "Traceback" not in outcome.stderr
    assert outcome.status != 0
    assert outcome.stdout == ""


# Generates, then says whether the module that was loaded is patched.
GENERATE = """
import sys
import wrapt
seen = []
wrapt.register_post_import_hook(seen.append, "mlx_lm.models.deepseek_v32")
{prelude}
from mlx_lm.generate import main
try:
    main()
finally:
    from mlx_sinks.patches.registry import patch_of
    (module,) = seen
    print(patch_of("dsa").is_on(module))
"""
UNTESTED = releases.PRETEND.format(package="mlx-lm", release="0.99.0")
CHANGED = "import mlx_lm.models; mlx_lm.models.__path__.insert(0, {folder!r})"
REPLACEMENT = """
def replacement(self, x, qr, mask, cache=None):
    return None
replacement.__module__ = "another_tool"
Indexer.__call__ = replacement

class DeepseekV32Attention(nn.Module):"""


def test_an_untested_release_of_known_code_works_and_says_so(folder, kept_by):
    model = "glm_moe_dsa", None
    code = GENERATE.format(prelude=UNTESTED)
    outcome = python(code, *options(folder(*model)), **ON)
    assert (outcome.status, outcome.stdout) == (0, kept_by(*model).stdout + "True\n")
    assert "mlx-lm 0.99.0 (untested)" in sentence(outcome)


def generate_with(source, folder, tmp_path):
    """Generate on a copy of upstream's module."""
    (tmp_path / "deepseek_v32.py").write_text(source)
    code = GENERATE.format(prelude=CHANGED.format(folder=str(tmp_path)))
    return python(code, *options(folder()), **ON)


def test_an_unchanged_copy_of_upstream_is_patched(folder, kept, tmp_path):
    source = Path(deepseek_v32.__file__).read_text()
    outcome = generate_with(source, folder, tmp_path)
    assert (outcome.status, outcome.stdout) == (0, kept.stdout + "True\n")
    assert "deepseek_v32: keeping 4 sinks + 8 recent among " in sentence(outcome)


@pytest.mark.parametrize(
    ("line", "instead", "difference"),
    [
        ("mx.maximum(scores, 0)", "mx.abs(scores)", "in prefill"),
        (
            "offset = cache.offset if cache is not None else 0",
            "offset = 0",
            "in decode",
        ),
        ("class Indexer(nn.Module):", "class Renamed(nn.Module):", "Indexer"),
        ("\nclass DeepseekV32Attention(nn.Module):", REPLACEMENT, "another_tool"),
    ],
    ids=["scores", "offset", "renamed", "replaced"],
)
def test_a_changed_upstream_is_refused(folder, tmp_path, line, instead, difference):
    source = Path(deepseek_v32.__file__).read_text()
    assert source.count(line) == 1
    changed = source.replace(line, instead)
    outcome = generate_with(changed, folder, tmp_path)
    refusal = sentence(outcome)
    for words in ("dsa (", f"mlx-lm {version('mlx-lm')}", difference):
        assert words in refusal
    assert refusal.endswith("or without mlx-sinks: export MLX_SINKS=0")  # python -c
    assert outcome.status != 0
    assert outcome.stdout == "False\n"
