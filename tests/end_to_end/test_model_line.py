"""The line that each model gets: it says what runs, before the answer begins."""

import inspect
import json
import logging
import re
import shlex
import subprocess
import sys
import types

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

import mlx_sinks
import small_models
import upstreams
from lines import heard
from mlx_sinks.patches.registry import install_from_environment
from processes import (
    command,
    environment,
    generation,
    python,
    run,
    serving_model,
)

ON = {"MLX_SINKS": "1"}
PROMPT = "The quick brown fox jumps over the lazy dog, who packs."
# What mlx-lm 0.31 needs besides.
MENDED = " and the checkpoint's rotary embedding of indexers"
NOTHING = "nothing to do: it selects no keys"
TWO_LAYERS = "keeping 4 sinks + 8 recent among the 16 keys selected in 2 of 2 layers"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each kind, written once."""
    root = tmp_path_factory.mktemp("models")
    facts = {**small_models.glm52(7), **small_models.MANY_HEADS}
    shared = small_models.shared_layers(facts)
    folders = {
        kind: small_models.write_folder(root / kind, kind)
        for kind in small_models.KINDS
    }
    folders["llama"] = small_models.write_llama_folder(root / "llama")
    folders["GLM-5.2"] = small_models.write_folder(
        root / "glm52", "glm_moe_dsa", without=shared, **facts
    )
    for kind in small_models.KINDS:
        own = small_models.write_folder(root / f"own {kind}", kind)
        (own / "own.py").write_text(upstreams.own_file(kind))
        config = json.loads((own / "config.json").read_text())
        (own / "config.json").write_text(json.dumps({**config, "model_file": "own.py"}))
        folders[f"own {kind}"] = own
    return folders


def generate(folder, *more, name="mlx_lm.generate", **variables):
    return run(command(name), *generation(folder, PROMPT, 3, *more), **variables)


def line_of(outcome):
    """The only line of ours."""
    assert outcome.status == 0, outcome.stderr
    (line,) = outcome.ours
    return line


# ---------------------------------------------------------- what is said of a model


@pytest.mark.parametrize(
    ("model", "value", "options", "said"),
    [
        ("llama", "1", "", f"llama: {NOTHING} and has no window ("),
        (
            "llama",
            "1",
            "--max-kv-size 32",
            "llama: keeping 4 sinks in a window of 32 tokens, in 1 of 1 layers (",
        ),
        (
            "llama",
            "kv_budget=24",
            "",
            "llama: keeping 4 sinks of prompts compacted to 24 rows, in 1 of 1 layers",
        ),
        (
            "llama",
            "kv_budget=24",
            "--max-kv-size 32",
            "in 1 of 1 layers; the budget of 24 rows has no effect "
            "(in 1 layer its cache is a RotatingKVCache) (",
        ),
        ("deepseek_v32", "1", "", f"deepseek_v32: {TWO_LAYERS} ("),
        ("deepseek_v32", "dsa=0", "", "2 layers select as upstream does (dsa is off)"),
        (
            "GLM-5.2",
            "1",
            "",
            "glm_moe_dsa: keeping 4 sinks + 8 recent among the 16 keys selected in "
            "4 of 7 layers and the same in 3 layers that reuse those selections (",
        ),
        (
            "glm_moe_dsa",
            "kv_budget=24",
            "",
            f"{TWO_LAYERS}; the budget of 24 rows has no effect "
            "(in 2 layers its cache is a CacheList) (",
        ),
        (
            "glm_moe_dsa",
            "1",
            "--max-kv-size 32",
            f"{TWO_LAYERS}; a window of 32 tokens has no effect (2 CacheList) (",
        ),
    ],
)
def test_one_line_before_the_answer(folders, model, value, options, said):
    words = generation(folders[model], PROMPT, 3, *options.split())
    both = subprocess.run(
        [command("mlx_lm.generate"), *words],
        env=environment(MLX_SINKS=value, PYTHONUNBUFFERED="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    lines = both.stdout.decode(errors="replace").splitlines()
    assert both.returncode == 0, lines
    (number,) = (n for n, line in enumerate(lines) if line.startswith("mlx-sinks"))
    assert said in lines[number].replace(MENDED, "")
    assert number < lines.index("=" * 10)


def test_the_servers_line_has_time_and_level(folders, tmp_path):
    with serving_model(tmp_path, folders["glm_moe_dsa"], **ON) as server:
        server.complete(prompt="Why?", max_tokens=1)
        (line,) = server.log().ours
    assert re.match(r"[\d-]+ [\d:,]+ - INFO - mlx-sinks: glm_moe_dsa: keeping ", line)


@pytest.mark.parametrize("kind", small_models.KINDS)
def test_a_folders_own_code_is_not_reached(folders, kind):
    folder = folders[f"own {kind}"]
    trust = ["--trust-remote-code"] * ("0.31" not in mlx_lm.__version__)
    line = line_of(generate(folder, *trust, **ON))
    code = f"the model folder's code ({folder}/own.py) selects the keys in 2 of 2"
    assert f"the folder's own model: not reached: {code} layers, and keeps" in line
    assert "no sinks; to be reached, take model_file out of its config.json (" in line


def replacement(kind):
    """Another's module under the name of mlx-lm's."""
    module = types.ModuleType(f"mlx_lm.models.{kind}")
    code = compile(upstreams.own_file(kind), "/host/private.py", "exec")
    exec(code, vars(module))
    return module


def said_of(folder):
    """What is said of a model that is loaded and generates."""
    with heard(logging.INFO) as lines:
        model, tokenizer = mlx_lm.load(str(folder))
        mlx_lm.generate(model, tokenizer, PROMPT, max_tokens=2)
    (line,) = (line for line in lines if "rotary" not in line)
    return line


@pytest.mark.parametrize("kind", small_models.KINDS)
def test_a_module_that_takes_the_place_of_upstreams(folders, monkeypatch, kind):
    mlx_sinks.install()
    monkeypatch.setitem(sys.modules, f"mlx_lm.models.{kind}", replacement(kind))
    line = said_of(folders[kind])
    place = f"/host/private.py, put in the place of mlx_lm.models.{kind},"
    assert f"{kind}: not reached: {place} selects the keys in 2 of 2 layers, " in line
    assert "and keeps no sinks; to be reached, run it with mlx_lm.generate (" in line


@pytest.mark.parametrize("kind", small_models.KINDS)
def test_a_module_that_stands_there_first(folders, monkeypatch, kind):
    """The same code in the place of what is patched is patched itself."""
    monkeypatch.setitem(sys.modules, f"mlx_lm.models.{kind}", replacement(kind))
    install_from_environment(mlx_sinks.SinkPolicy(), ["dsa", "index_share"])
    is_patched = kind == "deepseek_v32"
    assert (TWO_LAYERS in said_of(folders[kind])) == is_patched
    assert (
        "selects the keys in 2 of 2 layers, and keeps no sinks"
        in said_of(folders[kind])
    ) != is_patched


class OwnIndexer(nn.Module):
    def __init__(self):
        super().__init__()
        self.index_topk = 8


class BlockAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.index_topk_blocks = 8


@pytest.mark.parametrize("part", [OwnIndexer, BlockAttention])
def test_a_selector_that_nobody_here_has_seen(part):
    """A model built in Python, of another package's classes."""
    model = small_models.make_llama()
    model.layers[0].self_attn.more = part()
    mlx_sinks.install()
    with heard(logging.INFO) as lines:
        make_prompt_cache(model)
    (line,) = lines
    assert f"not reached: {part.__module__} (" in line
    assert "selects the keys in 1 of 1 layer, and keeps no sinks" in line


def test_models_with_windows_of_their_own_are_left():
    sliding = small_models.make_llama(
        num_hidden_layers=2,
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=8,
    )
    mlx_sinks.install()
    with heard(logging.INFO) as lines:
        make_prompt_cache(sliding)
        make_prompt_cache(sliding, 20)
    assert f"{NOTHING}, and leaves 1 sliding layer as trained" in lines[0]
    kept = "keeping 4 sinks in a window of 20 tokens, in 1 of 2 layers; the window "
    assert f"{kept}leaves the others as they are (1 RotatingKVCache) (" in lines[1]


def sliding_llama(window=8):
    """A full layer, and one that was trained with a window."""
    return small_models.make_llama(
        num_hidden_layers=2,
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=window,
    )


@pytest.mark.parametrize("sinks", [0, 4])
def test_a_window_of_the_size_that_a_layer_has_by_itself(sinks):
    mlx_sinks.install(mlx_sinks.SinkPolicy(sinks=sinks))
    with heard(logging.INFO) as lines:
        make_prompt_cache(sliding_llama(20), 20)
    kept = f"keeping {sinks} sinks in a window of 20 tokens, in 1 of 2 layers; the "
    assert kept in lines[0]


def test_windows_of_several_sizes_are_counted_apart():
    mlx_sinks.install()
    given = [RotatingKVCache(64, keep=4), RotatingKVCache(16, keep=2)]
    tokenizer, model = (
        small_models.tokenizer(),
        small_models.make_llama(num_hidden_layers=2),
    )
    with heard(logging.INFO) as lines:
        mlx_lm.generate(model, tokenizer, "Why?", max_tokens=1, prompt_cache=given)
    each = "4 sinks in a window of 64 tokens, in 1 of 2 layers and 2 sinks in a window "
    assert f"{each}of 16 tokens, in 1 of 2 layers (" in lines[0]


def test_a_policy_of_a_models_own_has_its_line():
    model, tokenizer = small_models.make(), small_models.tokenizer()

    def said():
        with heard(logging.INFO) as lines:
            mlx_lm.generate(model, tokenizer, PROMPT, max_tokens=1)
        return [line.partition(" (mlx-sinks")[0] for line in lines]

    mlx_sinks.install(targets=["rotating"])
    off = "mlx-sinks: deepseek_v32: 2 layers select as upstream does (dsa is off)"
    assert said() == [off]
    mlx_sinks.apply(model, mlx_sinks.SinkPolicy(sinks=2))
    (own,) = said()
    assert (
        "keeping 2 sinks + 8 recent among the 16 keys selected in 2 of 2 layers" in own
    )
    mlx_sinks.unapply(model)
    assert said() == [off]


def batch(model, **more):
    tokenizer = TokenizerWrapper(small_models.tokenizer())
    prompts = [[1, 2, 3], [4, 5, 6]]
    return mlx_lm.batch_generate(model, tokenizer, prompts, max_tokens=1, **more)


def test_a_batch_with_caches_of_its_own():
    mlx_sinks.install()
    model = small_models.make_llama()
    with heard(logging.INFO) as lines:
        batch(model, prompt_caches=[[RotatingKVCache(32, keep=4)] for _ in range(2)])
    assert "keeping 4 sinks in a window of 32 tokens, in 1 of 1 layers" in lines[0]


@pytest.mark.parametrize(
    ("beside", "targets"), [("a draft model", ["dsa"]), ("a prompt cache", None)]
)
def test_a_window_that_upstream_drops(beside, targets):
    mlx_sinks.install(targets=targets)
    model, tokenizer = small_models.make_llama(), small_models.tokenizer()
    more = {
        "a draft model": {"draft_model": small_models.make_llama(seed=1)},
        "a prompt cache": {"prompt_cache": make_prompt_cache(model)},
    }
    with heard() as lines:
        mlx_lm.generate(
            model, tokenizer, "Why?", max_tokens=2, max_kv_size=32, **more[beside]
        )
    (line,) = lines
    assert f"mlx-lm makes no window of 32 tokens beside {beside}" in line


def test_what_is_switched_off_is_said_beside_what_is_on():
    policy = mlx_sinks.SinkPolicy(kv_budget=24)
    mlx_sinks.install(policy, targets=["dsa"])
    model, tokenizer = small_models.make(), small_models.tokenizer()
    with heard(logging.INFO) as lines:
        mlx_lm.generate(model, tokenizer, PROMPT, max_tokens=1, max_kv_size=32)
    overlooked = (
        "its window of 32 tokens is overlooked by mlx-lm here (rotating is off)"
    )
    assert f"{TWO_LAYERS}; {overlooked}; prompts stay whole (snapkv is off)" in lines[0]


def test_looking_is_lazy_and_changes_no_signature():
    before = inspect.signature(mlx_lm.stream_generate)
    mlx_sinks.install()
    assert inspect.signature(mlx_lm.stream_generate) == before
    model, tokenizer = small_models.make_llama(), small_models.tokenizer()
    with heard(logging.INFO) as lines:
        stream = mlx_lm.stream_generate(model, tokenizer, "Why?", max_tokens=1)
        assert lines == []
        assert len(list(stream)) == 1
    assert len(lines) == 1


class Elsewhere(nn.Module):
    """A model whose layers share an indexer that stands beside them."""

    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(2, 2)]
        self.lightning_indexer = OwnIndexer()


class Sizes(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.layers = [nn.Linear(2, 2)]
        setattr(self.layers[0], name, [8, 8])


@pytest.mark.parametrize(
    "model",
    [Elsewhere(), *map(Sizes, ("index_topk", "sparse_topk", "topk_blocks"))],
    ids=lambda model: type(model).__name__,
)
def test_selectors_wherever_they_are(model):
    mlx_sinks.install()
    with heard(logging.INFO) as lines:
        make_prompt_cache(model)
    assert "selects the keys in 1 of 1 layer, and keeps no sinks" in lines[0]


@pytest.mark.parametrize("name", ["topk_group", "top_k", "num_experts_per_tok"])
def test_experts_are_no_selectors(name):
    mlx_sinks.install()
    with heard(logging.INFO) as lines:
        make_prompt_cache(Sizes(name))
    assert NOTHING in lines[0]


def test_models_built_in_python_have_their_line():
    mlx_sinks.install()
    with heard(logging.INFO) as lines:
        for kind in small_models.KINDS:
            make_prompt_cache(small_models.make(kind))
        model = small_models.make_llama()
        cache = mlx_sinks.make_sink_cache(model, 32, sinks=3)
        tokens = mx.array([1, 2, 3])
        list(generate_step(tokens, model, max_tokens=1))
    assert [line.split(":")[1].strip() for line in lines] == [
        *small_models.KINDS,
        "llama",
    ]
    with heard(logging.INFO) as lines:
        tokenizer = small_models.tokenizer()
        mlx_lm.generate(model, tokenizer, "Why?", max_tokens=2, prompt_cache=cache)
    assert "keeping 3 sinks in a window of 32 tokens, in 1 of 1 layers" in lines[0]


def test_indexers_called_before_any_line_have_one_of_their_own():
    mlx_sinks.install()
    model = small_models.make()
    with heard(logging.INFO) as lines:
        for _ in range(2):
            model(mx.array([small_models.tokens(0, 20)]))
    (line,) = lines
    assert "keeping 4 sinks + up to 128 recent in mlx_lm.models.deepseek_v32" in line


def test_a_line_that_cannot_be_made_disturbs_nobody(monkeypatch):
    mlx_sinks.install()
    patch = mlx_sinks.patches.registry.patch_of("dsa")
    monkeypatch.setattr(patch, "reach", lambda use, policy: 1 / 0)
    with heard() as lines:
        assert make_prompt_cache(small_models.make())
    assert "can't say what applies to mlx_lm.models.deepseek_v32.Model" in lines[0]


# --------------------------------------------------- programs that can't be reached


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """Packages with copies of mlx-lm, with adapters to it, and with its own models."""
    root = tmp_path_factory.mktemp("hosts")
    copies = "gmlx/_vendor/mlx_lm/models", "host/vendor/mlx_lm/models"
    for name in (*copies, "mlx_vlm", "app/backends/mlx_lm", "app/handler"):
        for folder in [(root / name), *(root / name).parents]:
            if folder == root:
                break
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "__init__.py").touch()
    for name in copies:
        (root / name / "cache.py").touch()
    (root / "app" / "handler" / "mlx_lm.py").write_text("import mlx_lm")
    return str(root)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "gmlx._vendor.mlx_lm",
            "gmlx runs models with its own copy of mlx-lm (gmlx._",
        ),
        ("host.vendor.mlx_lm", "host runs models with its own copy of mlx-lm (host."),
        ("mlx_vlm", "not reached: mlx_vlm runs models with code of its own, "),
    ],
)
def test_a_program_with_models_of_its_own(hosts, name, said):
    code = (
        f"import importlib.util as u; u.find_spec({name.split('.')[0]!r})\n"
        f"print('found', flush=True); import {name}; import {name}"
    )
    through = [command("mlx-sinks"), "run", sys.executable, "-c", code]
    for outcome in (
        python(code, PYTHONPATH=hosts, **ON),
        run(*through, PYTHONPATH=hosts),
    ):
        assert said in line_of(outcome)
        assert "to be reached, run them with mlx_lm.generate" in outcome.ours[0]
    off = python(code, PYTHONPATH=hosts, MLX_SINKS="0")
    assert (off.status, off.stderr) == (0, "")


@pytest.mark.parametrize("name", ["app.handler.mlx_lm", "app.backends.mlx_lm"])
def test_an_adapter_that_is_called_mlx_lm_is_no_copy(hosts, name):
    outcome = python(f"import {name}", PYTHONPATH=hosts, **ON)
    assert (outcome.status, outcome.stderr) == (0, "")


def test_run_says_that_a_command_has_another_python(tmp_path):
    script = tmp_path / "other"
    link = tmp_path / "python3"
    link.symlink_to("/bin/sh")
    script.write_text(f"#!{link}\necho started\n")
    script.chmod(0o755)
    outcome = run(command("mlx-sinks"), "run", script)
    assert outcome.stdout == "started\n"
    assert f"runs in another Python environment ({link})" in line_of(outcome)


# -------------------------------------------------------- refused where it runs wrongly


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    return upstreams.copied(tmp_path_factory.mktemp("known"), "0.33.0")


@pytest.mark.parametrize("model", ["llama", "glm_moe_dsa", "GLM-5.2"])
def test_an_untested_release_works_and_says_so(folders, known, model):
    line = line_of(generate(folders[model], PYTHONPATH=known, **ON))
    assert "mlx-lm 0.33.0 (untested)" in line
    tested = line_of(generate(folders[model], **ON))
    release = f"mlx-lm {mlx_lm.__version__}"
    assert line.replace("mlx-lm 0.33.0 (untested)", release) == tested


def test_an_untested_release_has_all_that_it_requires(known):
    outcome = python("from pip._internal.cli.main import main; main(['check'])")
    beside = run(sys.executable, "-m", "pip", "check", PYTHONPATH=known)
    assert "mlx-sinks" not in beside.stdout
    assert (beside.status, beside.stderr) == (0, outcome.stderr)


SCORES = "scores = mx.maximum(scores, 0)", "scores = mx.abs(scores)"
EVICTS = "self.keep = keep\n", "self.keep = keep // 2\n"


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    edits = {"deepseek_v32.py": SCORES, "cache.py": EVICTS}
    return {
        name: upstreams.copied(
            tmp_path_factory.mktemp("changed"), "0.33.0", {name: edit}
        )
        for name, edit in edits.items()
    }


def run_again(sentence, **variables):
    """The command with which a refusal ends."""
    found = re.search(
        r"go on without (?:it|these) by (MLX_SINKS=\S+), or without "
        r"mlx-sinks: (MLX_SINKS=0 .*)$",
        sentence,
    )
    setting, words = found.groups()
    path = f"{command('x')[:-2]}:/usr/bin:/bin"
    outcomes = [
        run("sh", "-c", line, PATH=path, **variables)
        for line in (words, words.replace("MLX_SINKS=0", setting))
    ]
    assert [outcome.status for outcome in outcomes] == [0, 0], outcomes
    return outcomes


@pytest.mark.parametrize(
    ("file", "model", "options", "target"),
    [
        ("deepseek_v32.py", "glm_moe_dsa", "", "dsa"),
        ("deepseek_v32.py", "GLM-5.2", "", "dsa"),
        ("deepseek_v32.py", "deepseek_v32", "", "dsa"),
        ("cache.py", "llama", "--max-kv-size 32", "rotating"),
    ],
)
def test_what_would_run_wrongly_is_refused_in_a_sentence(
    folders, changed, file, model, options, target
):
    path = {"PYTHONPATH": changed[file]}
    outcome = generate(folders[model], *options.split(), **path, **ON)
    assert outcome.status == 1
    (line,) = outcome.stderr.splitlines()
    assert line.startswith(
        f"mlx-sinks: can't patch mlx-lm 0.33.0 (untested): {target} ("
    )
    assert "=" * 10 not in outcome.stdout or target == "rotating"
    if model != "GLM-5.2":  # which stock can't load
        run_again(line, **path)


@pytest.mark.parametrize(
    ("file", "model", "options"),
    [
        ("deepseek_v32.py", "llama", ""),
        ("deepseek_v32.py", "llama", "--max-kv-size 32"),
        ("cache.py", "llama", ""),
        ("cache.py", "glm_moe_dsa", ""),
    ],
)
def test_what_needs_nothing_of_it_runs(folders, changed, file, model, options):
    path = {"PYTHONPATH": changed[file]}
    line = line_of(generate(folders[model], *options.split(), **path, **ON))
    assert ": can't patch" not in line


def test_all_that_fails_is_named_at_once(folders, tmp_path):
    edits = {"deepseek_v32.py": ("class Indexer(nn.Module):", "class I(nn.Module):")}
    path = {"PYTHONPATH": upstreams.copied(tmp_path, edits=edits)}
    outcome = generate(folders["deepseek_v32"], **path, **ON)
    (line,) = outcome.stderr.splitlines()
    assert "dsa (" in line and "indexer_fidelity (" in line
    assert 'MLX_SINKS="dsa=0,indexer_fidelity=0"' in line


@pytest.mark.parametrize(
    ("file", "edit", "model", "options", "said"),
    [
        (
            "cache.py",
            ("def make_prompt_cache(", "def make_the_cache("),
            "llama",
            "",
            f"{NOTHING} and has no window",
        ),
        (
            "cache.py",
            ("class RotatingKVCache(_BaseCache):", "class Turning(_BaseCache):"),
            "glm_moe_dsa",
            "",
            "keeping 4 sinks + 8 recent",
        ),
    ],
    ids=["maker", "window"],
)
def test_releases_without_a_name(folders, tmp_path, file, edit, model, options, said):
    """What a model doesn't need may be gone."""
    copy = upstreams.copied(tmp_path, "0.34.0", {file: edit})
    old, new = (each.split("(")[0].split()[-1] for each in edit)
    for source in (tmp_path / "mlx_lm").rglob("*.py"):
        text = source.read_text()
        source.write_text(re.sub(rf"(?<!\w){old}\b", new, text))
    outcome = generate(folders[model], *options.split(), PYTHONPATH=copy, **ON)
    assert said in line_of(outcome)


# A fork that reads the offset first, and rotates queries after the cache has moved it.
FORK = (
    "offset = cache.offset if cache is not None else 0\n",
    "offset = cache.offset if cache is not None else 0\n"
    "        if cache is not None and not isinstance(offset, int):\n"
    "            offset = offset + 1\n",
)


def test_a_fork_is_refused_when_its_model_is_built_and_not_before(folders, tmp_path):
    """A host that imports the module at start-up goes on with any other model."""
    edits = {"deepseek_v32.py": FORK}
    path = {"PYTHONPATH": upstreams.copied(tmp_path, edits=edits)}
    code = """
import sys, mlx_lm, mlx_lm.models.deepseek_v32, mlx_lm.models.glm_moe_dsa
for folder in sys.argv[1:]:
    try:
        model, tokenizer = mlx_lm.load(folder)
        print(len(mlx_lm.generate(model, tokenizer, "Why?", max_tokens=2)) > 0)
    except RuntimeError as error:
        print(error)
"""
    outcome = python(code, folders["llama"], folders["deepseek_v32"], **path, **ON)
    assert outcome.status == 0, outcome.stderr
    ran, refused = outcome.stdout.splitlines()
    assert ran == "True"
    assert "differs from upstream's in a left-padded batch" in refused


# ------------------------------------------------------------- no traceback of ours


@pytest.mark.parametrize("words", ["doctor", "probe --model x", "run python -c ''"])
def test_mlx_without_a_backend_gets_a_sentence(tmp_path, words):
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").touch()
    error = "libmlx.so: cannot open shared object file: No such file or directory"
    (tmp_path / "mlx" / "core.py").write_text(f"raise ImportError({error!r})")
    words = shlex.split(words)
    if words[0] == "run":
        words = ["run", sys.executable, "-c", "import mlx_lm"]
    outcome = run(command("mlx-sinks"), *words, PYTHONPATH=str(tmp_path))
    assert outcome.status != 0
    (line,) = outcome.stderr.splitlines()
    assert f"MLX has no backend here ({error})" in line
    assert "pip install 'mlx[cpu]'" in line


def test_a_fault_of_ours_gets_a_sentence(tmp_path):
    code = """
import mlx_sinks.patches.registry as registry
registry._follow_requests = lambda *_, **__: 1 / 0
import mlx_lm
"""
    outcome = python(code, **ON)
    assert outcome.status != 0
    (line,) = outcome.stderr.splitlines()
    assert "can't patch this upstream (ZeroDivisionError" in line
    assert line.endswith("go on without mlx-sinks: export MLX_SINKS=0")
