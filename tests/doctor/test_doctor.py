"""``mlx-sinks doctor`` on made checkpoints: each cause told from the others."""

import json
import os
import re
import shutil
from types import SimpleNamespace

import mlx.core as mx
import pytest
from huggingface_hub.errors import NotASafetensorsRepoError
from mlx_lm.models import cache, deepseek_v32

import mlx_sinks
import releases
import small_models
from mlx_sinks import cli
from mlx_sinks.doctor import checkpoint_files, places
from mlx_sinks.patches.registry import patch_of
from mlx_sinks.policy import Settings
from mlx_sinks.targets import TARGETS, Target
from processes import command, run
from verdicts import causes

INDEX_TOPK = small_models.INDEX_TOPK
SHARED = small_models.glm52(7)
ON = "sinks=4,recency=6"
STOCK_IGNORES_ROPE = not hasattr(deepseek_v32.ModelArgs(), "indexer_rope_interleave")


LONGROPE = {
    "type": "longrope",
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0] * 8,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Made checkpoints, by name."""
    root = tmp_path_factory.mktemp("checkpoints")
    write = small_models.write_folder
    left_out = small_models.shared_layers(SHARED)
    unusual = {"deepseek_v32": True, "glm_moe_dsa": False}
    made = {
        "deepseek": write(root / "deepseek"),
        "glm": write(root / "glm", "glm_moe_dsa"),
        "shared": write(root / "shared", "glm_moe_dsa", without=left_out, **SHARED),
        "made up": write(root / "made up", "glm_moe_dsa", **SHARED),
        "4-bit": write(
            root / "4-bit", "glm_moe_dsa", bits=4, without=left_out, **SHARED
        ),
        "3-bit": write(root / "3-bit", bits=3),
        "no schedule": write(
            root / "no schedule",
            "glm_moe_dsa",
            without=left_out,
            num_hidden_layers=7,
        ),
        "llama": small_models.write_llama_folder(root / "llama"),
    }
    for kind, interleaves in unusual.items():
        made[f"unusual {kind}"] = write(
            root / f"unusual {kind}", kind, indexer_rope_interleave=interleaves
        )
    stated = {"indexer_rope_interleave": True, "rope_scaling": LONGROPE}
    made["no switch"] = write(root / "no switch", **stated)
    made["halves"] = write(root / "halves", rope_scaling=LONGROPE)
    qwen = made["qwen"] = small_models.write_llama_folder(root / "qwen")
    config = json.loads((qwen / "config.json").read_text())
    needed = {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True}
    needed |= {"max_position_embeddings": 4096, "rope_theta": 1e4}
    needed |= {"num_key_value_heads": 2}
    (qwen / "config.json").write_text(json.dumps({**config, **needed}))
    return made


def rope_of_stock(kind):
    return ["RoPE flipped"] * (STOCK_IGNORES_ROPE and kind == "deepseek")


@pytest.mark.parametrize("name", ["deepseek", "glm", "shared", "4-bit"])
def test_a_faithful_checkpoint_is_healthy_where_the_plugin_is_on(doctor, folders, name):
    status, result = doctor("--model", folders[name], variable=ON)
    assert (status, causes(result)) == (0, [])
    assert result["verdicts"][0]["cause"] == "healthy"


@pytest.mark.parametrize("name", ["deepseek", "glm"])
def test_sinks_are_lost_in_stock_past_index_topk(doctor, folders, name):
    status, result = doctor("--model", folders[name])
    assert (status, causes(result)) == (1, [*rope_of_stock(name), "sinks lost"])
    assert f"mlx_lm.generate --model {folders[name]}" in result["verdicts"][-1]["fix"]


def test_what_fits_loses_nothing(doctor, folders):
    status, result = doctor("--model", folders["glm"], "--context", INDEX_TOPK)
    assert (status, causes(result)) == (0, [])
    _, result = doctor("--model", folders["glm"], "--context", INDEX_TOPK + 1)
    assert causes(result) == ["sinks lost"]


@pytest.mark.parametrize("name", ["shared", "made up", "4-bit"])
def test_shared_layers_are_uninitialised_in_stock(doctor, folders, name):
    status, result = doctor("--model", folders[name])
    assert status == 1
    assert causes(result) == ["shared layers uninitialised", "sinks lost"]
    sentence = result["verdicts"][0]["sentence"]
    assert "3 of 7 layers" in sentence
    assert ("a converter made up" in sentence) == (name == "made up")
    assert ("can't load it" in sentence) == (name != "made up")
    # What fits in index_topk saves them where all weights were made up; with some
    # missing, loading does not get that far.
    _, result = doctor("--model", folders[name], "--context", INDEX_TOPK)
    assert causes(result) == ["shared layers uninitialised"] * (name != "made up")


def test_a_switched_off_target_counts(doctor, folders):
    options = ("--model", folders["shared"])
    _, result = doctor(*options, variable="index_share=0")
    assert causes(result) == ["shared layers uninitialised"]
    _, result = doctor(*options, variable="dsa=0")
    assert causes(result) == ["sinks lost"]
    status, result = doctor(*options, variable="0")
    assert (status, len(causes(result))) == (1, 2)


def test_a_shell_that_asks_for_too_little_or_too_much(doctor, folders):
    options = ("--model", folders["glm"])
    for variable in ("sinks=0", "sinks=0,recency=0", "sinks=0,recency=8"):
        _, result = doctor(*options, variable=variable)
        assert causes(result) == ["sinks lost"]
    _, result = doctor(*options, variable=f"sinks={INDEX_TOPK}")
    assert causes(result) == ["too many sinks"]
    window = ("--model", folders["llama"], "--max-kv-size", 10)
    assert causes(doctor(*window, variable="sinks=0")[1]) == ["rotating mask"]
    assert causes(doctor(*window, variable="sinks=10")[1]) == ["too many sinks"]


@pytest.mark.parametrize(
    ("variable", "fixed"),
    [
        (None, "MLX_SINKS=1"),
        ("0", "MLX_SINKS=1"),
        ("dsa=0", "MLX_SINKS=1"),
        ("sinks=0", "MLX_SINKS=1"),
        ("sinks=8,recency=4,dsa=0", 'MLX_SINKS="sinks=8,recency=4"'),
        ("rotating=0,dsa=0", 'MLX_SINKS="rotating=0"'),
    ],
)
def test_a_fix_keeps_what_the_shell_says(doctor, folders, variable, fixed):
    _, result = doctor("--model", folders["glm"], variable=variable)
    command = f"mlx_lm.generate --model {folders['glm']}"
    assert result["verdicts"][-1]["fix"] == f"{fixed} {command}"


def test_a_fix_can_be_pasted(doctor, folders):
    _, result = doctor("--model", folders["made up"])
    assert result["verdicts"][0]["fix"].endswith(f"--model '{folders['made up']}'")


def test_weights_that_a_converter_made_up_are_named(doctor, folders):
    status, result = doctor("--model", folders["made up"], variable=ON)
    (_, left_out) = result["verdicts"]
    assert (status, left_out["cause"]) == (0, "weights left out")


def test_layers_that_should_select_and_can_not(doctor, folders):
    status, result = doctor("--model", folders["no schedule"], variable=ON)
    assert (status, causes(result)) == (1, ["indexer weights missing"])
    assert "layers 3, 4, 5 should" in result["verdicts"][0]["sentence"]


@pytest.mark.parametrize("kind", small_models.KINDS)
def test_what_a_configuration_states_is_believed(doctor, folders, kind):
    """Weights of GLM-5's convention are published as deepseek_v32, too."""
    status, result = doctor("--model", folders[f"unusual {kind}"], variable=ON)
    assert (status, causes(result)) == (0, [])
    said = [verdict["cause"] for verdict in result["verdicts"]]
    assert said == ["healthy", "unusual RoPE"]


@pytest.mark.parametrize(
    "facts",
    [
        {"indexer_rope_interleave": "false"},
        {"indexer_rope_interleave": []},
        {"rope_scaling": {"type": "mrope"}},
        {"rope_scaling": {"type": "linear", "factor": 0}},
        {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 0}},
    ],
)
def test_a_rotary_embedding_that_cannot_be_built(doctor, folders, tmp_path, facts):
    folder = shutil.copytree(folders["deepseek"], tmp_path / "odd")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **facts}))
    status, result = doctor("--model", folder, variable=ON)
    assert (status, causes(result)) == (1, ["configuration"])


@pytest.mark.skipif(STOCK_IGNORES_ROPE, reason="this mlx-lm doesn't read the key")
@pytest.mark.parametrize("stated", [None, 0, 1])
def test_a_convention_that_stock_fails_with(doctor, folders, tmp_path, stated):
    folder = shutil.copytree(folders["deepseek"], tmp_path / "odd")
    config = json.loads((folder / "config.json").read_text())
    config["indexer_rope_interleave"] = stated
    (folder / "config.json").write_text(json.dumps(config))
    _, result = doctor("--model", folder)
    assert causes(result) == ["configuration", "sinks lost"]
    assert "fails at its first token" in result["verdicts"][0]["sentence"]
    assert doctor("--model", folder, variable=ON)[0] == 0


def test_a_rotary_embedding_that_has_no_switch(doctor, folders):
    """Longrope rotates halves in every mlx-lm: what needs no more is healthy."""
    status, result = doctor("--model", folders["halves"], variable=ON)
    assert (status, causes(result)) == (0, [])
    status, result = doctor("--model", folders["no switch"], variable=ON)
    assert (status, causes(result)) == (1, ["RoPE flipped"])
    assert "SuScaledRoPE can't rotate so" in result["verdicts"][0]["fix"]


@pytest.mark.skipif(not STOCK_IGNORES_ROPE, reason="this mlx-lm reads the convention")
def test_an_mlx_lm_that_ignores_the_convention(doctor, folders):
    _, result = doctor("--model", folders["deepseek"], variable="indexer_fidelity=0")
    assert causes(result) == ["RoPE flipped"]
    _, result = doctor("--model", folders["glm"], variable="indexer_fidelity=0")
    assert causes(result) == []


@pytest.mark.parametrize("name", ["llama", "qwen"])
def test_no_false_alarm_on_plain_models(doctor, folders, name):
    for variable in (None, "1", "rotating=0"):
        status, result = doctor("--model", folders[name], variable=variable)
        assert (status, causes(result)) == (0, [])


@pytest.mark.parametrize("name", ["llama", "qwen"])
def test_a_rotating_window(doctor, folders, name):
    options = ("--model", folders[name], "--max-kv-size", 512)
    status, result = doctor(*options)
    assert (status, causes(result)) == (1, ["rotating mask"])
    assert "--max-kv-size 512" in result["verdicts"][0]["fix"]
    assert doctor(*options, variable="1")[0] == 0
    assert doctor(*options, variable="rotating=0")[0] == 1
    assert doctor(*options, "--context", 512)[0] == 0


def test_a_window_that_reaches_no_layer(doctor, folders):
    _, result = doctor("--model", folders["glm"], "--max-kv-size", 64, variable=ON)
    assert [v["cause"] for v in result["verdicts"]] == ["healthy", "no window"]


def test_formats_of_the_indexers(doctor, folders):
    formats = {
        name: doctor("--model", folders[name])[1]["model"].get("indexer_formats")
        for name in ("deepseek", "4-bit", "3-bit", "llama")
    }
    assert formats == {
        "deepseek": {"F32": 6},
        "4-bit": {"4-bit": 12},
        "3-bit": {"3-bit": 6},
        "llama": None,
    }
    _, result = doctor("--model", folders["3-bit"], variable=ON)
    assert [v["cause"] for v in result["verdicts"]] == ["healthy", "coarse indexer"]


# ---------------------------------------------------------------- the installation


def test_the_installation_by_its_behaviour(doctor, folders):
    status, result = doctor(folders["llama"])
    found = {place["target"]: place for place in result["places"]}
    assert status == 0
    assert found.keys() == TARGETS.keys()
    # The release has no SnapKV of its own: ours adds one where somebody asks for it.
    assert found.pop("snapkv")["faults"] == []
    for place in found.values():
        assert (place["cured"], place["on"], place["open"]) == (True, False, True)
    assert len(found["rotating"]["faults"]) == 3
    for variable, off in (("1", set()), ("rotating=0", {"rotating"})):
        places = doctor(folders["llama"], variable=variable)[1]["places"]
        assert {place["target"] for place in places if place["open"]} == off


def test_an_upstream_without_the_fault_is_not_affected(monkeypatch):
    """By behaviour, not by version: here upstream's own mask shows the sinks."""
    monkeypatch.setattr(
        cache.RotatingKVCache,
        "make_mask",
        patch_of("rotating")._make_mask.__globals__["rotating_mask"],
    )
    (found,) = (p for p in places.examine(Settings()) if p.target == "rotating")
    assert not any("hides" in fault for fault in found.faults)


def test_a_checkpoint_is_examined_without_another_package(monkeypatch, doctor, folders):
    facts = {**vars(TARGETS["dsa"]), "name": "elsewhere", "package": "mlx-other"}
    other = Target(**facts)
    monkeypatch.setitem(TARGETS, "elsewhere", other)
    for name, variable in (("glm", ON), ("llama", ON), ("llama", None)):
        assert doctor("--model", folders[name], variable=variable)[0] == 0
    options = ("--model", folders["glm"], "--probe", "--tokens", 40)
    status, result = doctor(*options, variable=ON)
    assert result["verdicts"][0]["cause"].startswith("indexers")


def test_a_release_that_is_untested_is_tried(monkeypatch, doctor, folders):
    tested = doctor(folders["glm"], variable="1")
    releases.pretend(monkeypatch, "mlx-lm", "0.99.0")
    status, result = doctor(folders["glm"], variable="1")
    assert "mlx-lm 0.99.0 (untested)" in result["versions"]
    assert (status, result["places"]) == (tested[0], tested[1]["places"])


def test_a_release_that_is_refused(monkeypatch, doctor, folders):
    monkeypatch.setattr(patch_of("dsa"), "self_check", lambda module: "it differs")
    status, result = doctor(folders["glm"], variable="1")
    assert status == 1
    (refused,) = (place for place in result["places"] if place["refused"])
    assert refused["target"] == "dsa"
    for sentence in (refused["refused"], result["verdicts"][0]["fix"]):
        assert "dsa (it differs)" in sentence


@pytest.mark.parametrize(("least", "affected"), [(0, True), (4, False)])
def test_a_fork_with_a_snapkv_of_its_own(monkeypatch, doctor, folders, least, affected):
    def keep(seq_len, budget, scores, *, sink_tokens):
        sinks = max(least, min(sink_tokens, budget // 8))
        return (*range(sinks), *range(seq_len - budget + sinks, seq_len))

    monkeypatch.setattr(cache, "snapkv_keep_indices", keep, raising=False)
    status, result = doctor(folders["llama"], variable="1")
    assert (status == 1) == affected
    assert causes(result) == ["snapkv"] * affected
    assert not affected or "2 of 4 sinks" in result["verdicts"][0]["sentence"]


def test_weights_of_an_indexer_that_are_incomplete(doctor, folders, tmp_path):
    folder = shutil.copytree(folders["glm"], tmp_path / "torn")
    weights = mx.load(str(folder / "model.safetensors"))
    del weights["model.layers.1.self_attn.indexer.wk.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    _, result = doctor("--model", folder, variable=ON)
    assert causes(result) == ["indexer weights missing"]
    assert "layer 1 should" in result["verdicts"][0]["sentence"]


def test_layers_of_multi_token_prediction_do_not_count(doctor, folders, tmp_path):
    folder = shutil.copytree(folders["glm"], tmp_path / "mtp")
    weights = mx.load(str(folder / "model.safetensors"))
    weights |= {
        name.replace("layers.1", "layers.2"): value
        for name, value in weights.items()
        if "layers.1" in name
    }
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    _, result = doctor("--model", folder, variable=ON)
    assert result["model"]["layers_with_indexer_weights"] == 2
    assert result["model"]["indexer_formats"] == {"F32": 6}


def test_nothing_stays_patched(doctor, folders):
    upstream = deepseek_v32.Indexer.__call__
    doctor("--model", folders["shared"], variable="1")
    assert deepseek_v32.Indexer.__call__ is upstream


# ------------------------------------------------------------------------ the probe


def test_with_a_probe_it_looks_at_what_indexers_choose(doctor, folders, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(
        "The quick brown fox jumps over the lazy dog, again and again. " * 2
    )
    options = ("--model", folders["shared"], "--probe", "--text", text, "--tokens", 100)
    status, result = doctor(*options, variable=ON)
    assert (status, causes(result)) == (1, ["indexers choose badly"])
    assert len(result["verdicts"]) == 1
    assert "of 7 layers" in result["verdicts"][0]["sentence"]
    assert "until then: MLX_SINKS=1 mlx_lm" in result["verdicts"][0]["fix"]
    _, result = doctor(*options, variable="1")
    assert "the guarantee, which is on" in result["verdicts"][0]["fix"]


def test_a_probe_that_can_not_be_leaves_the_rest(doctor, folders, tmp_path):
    status, result = doctor("--model", folders["llama"], "--probe")
    assert (status, result["verdicts"][-1]["cause"]) == (0, "nothing selects")
    text = tmp_path / "text.txt"
    text.write_text("short")
    options = ("--model", folders["glm"], "--probe", "--text", text)
    status, result = doctor(*options, variable=ON)
    assert (status, result["verdicts"][-1]["cause"]) == (2, "not probed")
    options = ("--model", folders["shared"], "--probe")
    status, result = doctor(*options)
    assert (status, causes(result)[0]) == (2, "shared layers uninitialised")
    sentence = result["verdicts"][-1]["sentence"]
    assert "Set MLX_SINKS=1" in sentence and "\n" not in sentence


# ------------------------------------------------------------------------ as a user


def test_the_command_says_what_it_found(folders, tmp_path):
    out = tmp_path / "new" / "folder"
    argv = (command("mlx-sinks"), "doctor", "--model", folders["shared"])
    sick = run(*argv, "--out", out)
    assert (sick.status, sick.stderr) == (1, "")
    assert "shared layers uninitialised: 3 of 7" in sick.stdout
    assert f"MLX_SINKS=1 mlx_lm.generate --model {folders['shared']}" in sick.stdout
    written = json.loads((out / "doctor.json").read_text())
    assert causes(written)[0] == "shared layers uninitialised"
    well = run(*argv, MLX_SINKS="1")
    assert (well.status, well.stderr) == (0, "")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--model", "gone"], "neither a folder nor a hub id"),
        (["--model", "empty"], "no config.json"),
        (["--model", "damaged"], "config.json is damaged"),
        (["--model", "list"], "config.json is no configuration"),
        (["--model", "kindless"], "names no model_type"),
        (["--model", "not whole"], "not whole: model-2.safetensors missing"),
        (["--model", "no weights"], "has no model*.safetensors"),
        (["--model", "torn"], "is no safetensors file"),
        (["--model", "schedule"], None),
        (["--model", "nobody/has-this"], "can't be read from the hub"),
        (["--probe"], "--probe needs a model: mlx-sinks doctor MODEL"),
        (["--context", "100"], "--context needs a model: mlx-sinks doctor MODEL"),
        (["one", "--model", "two"], "which model, one or two?"),
        (["--queries", "9", "--block", "8"], "--queries 9 exceeds --block 8"),
        (["--model", "list of files"], "its weight_map names no files"),
    ],
)
def test_what_can_not_be_gets_a_sentence(
    options, sentence, folders, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    config = json.loads((folders["glm"] / "config.json").read_text())
    wrong = {**config, "indexer_types": ["shared", "full"]}
    made = {
        "empty": {},
        "damaged": {"config.json": "{"},
        "list": {"config.json": "[1]"},
        "kindless": {"config.json": '{"model_type": ["llama"]}'},
        "not whole": {
            "config.json": json.dumps(config),
            "model.safetensors.index.json": json.dumps(
                {"weight_map": {"a": "model-2.safetensors"}}
            ),
        },
        "list of files": {
            "config.json": json.dumps(config),
            "model.safetensors.index.json": '{"weight_map": ["a"]}',
        },
        "no weights": {"config.json": json.dumps(config)},
        "torn": {"config.json": json.dumps(config), "model.safetensors": "torn"},
    }
    for name, files in made.items():
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / file).write_text(content)
    (tmp_path / "schedule").mkdir()
    weights = folders["glm"] / "model.safetensors"
    (tmp_path / "schedule" / weights.name).write_bytes(weights.read_bytes())
    (tmp_path / "schedule" / "config.json").write_text(json.dumps(wrong))
    monkeypatch.chdir(tmp_path)
    status = cli.main(["doctor", *options])
    printed = capsys.readouterr()
    if sentence is None:
        assert status == 1
        assert "indexer_types marks the first layer as shared" in printed.out
    else:
        (line,) = printed.err.splitlines()
        assert status == 2
        assert line.startswith("mlx-sinks: ") and sentence in line


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers must be"),
        ({"num_hidden_layers": "7"}, "num_hidden_layers must be"),
        ({"hidden_size": 0}, "hidden_size must be"),
        ({"q_lora_rank": None}, "q_lora_rank must be"),
        ({"index_topk": "16"}, "index_topk must be"),
        ({"index_n_heads": None}, "index_n_heads must be"),
        ({"index_head_dim": [1]}, "index_head_dim must be"),
        ({"max_position_embeddings": "4096"}, "max_position_embeddings must be"),
        ({"rope_parameters": None}, "configuration"),
        ({"index_topk_pattern": ["F", {}]}, "schedule"),
    ],
)
def test_a_configuration_with_something_odd(folders, tmp_path, capsys, facts, cause):
    folder = shutil.copytree(folders["glm"], tmp_path / "odd")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **facts}))
    status = cli.main(["doctor", "--model", str(folder)])
    printed = capsys.readouterr()
    if "must be" in cause:
        (line,) = printed.err.splitlines()
        assert status == 2 and cause in line
    else:
        assert status == 1 and f"✗ {cause}: " in printed.out


@pytest.mark.parametrize("out", ["file", "file/folder"])
def test_a_folder_that_can_not_be_is_known_before(out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as exit:
        cli.main(["doctor", "--out", out])
    assert exit.value.code == 2


def test_whatever_the_hub_raises_is_a_sentence(monkeypatch, capsys):
    def raising(*arguments):
        raise NotASafetensorsRepoError

    monkeypatch.setattr(checkpoint_files, "_folder", lambda name: None)
    monkeypatch.setattr(checkpoint_files, "hf_hub_download", raising)
    assert cli.main(["doctor", "--model", "somebody/bin-only"]) == 2
    assert "from the hub: NotASafetensorsRepoError" in capsys.readouterr().err


def test_of_the_hub_only_headers_are_read(monkeypatch, doctor, folders):
    """With a hub that has the files of a folder here."""
    folder = folders["shared"]
    header = checkpoint_files._header(folder / "model.safetensors")
    tensors = {
        name: SimpleNamespace(dtype=dtype, shape=list(shape))
        for name, (dtype, shape) in header.items()
    }
    files = {"model.safetensors": SimpleNamespace(tensors=tensors)}
    metadata = SimpleNamespace(files_metadata=files)
    hub = SimpleNamespace(get_safetensors_metadata=lambda name: metadata)
    monkeypatch.setattr(checkpoint_files, "HfApi", lambda: hub)
    monkeypatch.setattr(
        checkpoint_files, "hf_hub_download", lambda name, file: folder / file
    )
    monkeypatch.setattr(checkpoint_files, "_folder", lambda name: None)
    status, result = doctor("--model", "zai-org/GLM-5.2")
    assert causes(result) == ["shared layers uninitialised", "sinks lost"]
    assert result["model"]["name"] == "zai-org/GLM-5.2"


def test_a_large_checkpoint_is_read_by_its_headers(monkeypatch, doctor, tmp_path):
    """Files that say they are 400 GB, and are holes."""
    config = {**small_models.config("glm_moe_dsa"), **small_models.glm52()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for number in range(80):
        layer = f"model.layers.{number}"
        names = [f"{layer}.mlp.experts.{e}.up_proj.weight" for e in range(256)]
        if number in range(78) and config["indexer_types"][number] == "full":
            parts = sorted(checkpoint_files._PARTS)
            names += [f"{layer}.self_attn.indexer.{part}" for part in parts]
        entry = {"dtype": "BF16", "shape": [1, 1], "data_offsets": [0, 2]}
        header = json.dumps(dict.fromkeys(names, entry)).encode()
        file = tmp_path / f"model-{number}.safetensors"
        file.write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(file, 5_000_000_000)
    status, result = doctor("--model", tmp_path, variable="1")
    assert (status, result["model"]["layers_with_indexer_weights"]) == (0, 21)


def test_apply_and_install_still_work_after_it(doctor, folders):
    doctor("--model", folders["glm"])
    assert mlx_sinks.install(targets=["dsa"])


@pytest.mark.parametrize("colour", [{}, {"FORCE_COLOR": "1"}])
@pytest.mark.parametrize("name", ["glm", "shared", "made up", "3-bit", "llama", "qwen"])
def test_a_page_fits_a_terminal(folders, name, colour):
    """The verdict comes first; only what can be pasted may go past the edge."""
    words = ("doctor", folders[name], "--all")
    outcome = run(command("mlx-sinks"), *words, COLUMNS="80", **colour)
    plain = re.sub(r"\x1b\[[\d;]*m", "", outcome.stdout)
    assert (plain != outcome.stdout) == bool(colour)
    first, *lines = plain.splitlines()
    assert first[0] in "✓✗?"
    assert [line for line in lines if len(line) > 80 and "→" not in line] == []
    assert "…" not in plain


def test_the_model_is_named_in_either_way(folders, doctor):
    assert doctor(folders["glm"]) == doctor("--model", folders["glm"])
