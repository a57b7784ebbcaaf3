"""What build.py writes, refuses and keeps, on a llama in miniature."""

import json

import mlx.core as mx
import mlx.nn as nn
import pytest

import small_models
from smollm2 import build, mla
from smollm2.build import INDEX, INDEXER_WEIGHTS, Recipe

LAYERS = 7
FACTS = {"num_hidden_layers": LAYERS, "max_position_embeddings": 4096}


def write_llama(folder, **facts):
    facts = {
        name: fact for name, fact in {**FACTS, **facts}.items() if fact is not None
    }
    return small_models.write_llama_folder(folder, **facts)


@pytest.fixture
def llama(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("llama") / "llama")


@pytest.fixture
def out(tmp_path):
    """In a folder that has nothing else in it before and after."""
    path = tmp_path / "out"
    yield path
    assert {at.name for at in tmp_path.iterdir()} <= {"out"}


def layers_with_an_indexer(folder):
    return {build.layer_of(name) for name in mx.load(str(folder / INDEXER_WEIGHTS))}


@pytest.mark.parametrize(
    ("options", "shared"),
    [({}, []), ({"share": 4}, [1, 2, 3, 5, 6]), ({"share": 3}, [1, 2, 4, 5])],
)
@pytest.mark.parametrize("made_up", [False, True])
def test_layers_share_as_the_configuration_says(llama, out, options, shared, made_up):
    if made_up and not shared:
        pytest.skip("there is nothing to make up")
    recipe = Recipe("glm_moe_dsa", index_topk=8, made_up=made_up, **options)
    build.build(out, recipe, str(llama))
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["index_topk"]) == ("glm_moe_dsa", 8)
    kinds = config.get("indexer_types", ["full"] * LAYERS)
    assert [n for n, kind in enumerate(kinds) if kind == "shared"] == shared
    without = set() if made_up else set(shared)
    assert layers_with_an_indexer(out) == set(range(LAYERS)) - without
    named = json.loads((out / INDEX).read_text())["weight_map"]
    held = {name for file in out.glob("*.safetensors") for name in mx.load(str(file))}
    assert named.keys() == held


def test_a_folder_is_replaced_by_one_of_another_kind(llama, out):
    for kind in ("llama", "deepseek_v32", "glm_moe_dsa", "llama"):
        build.build(out, Recipe(kind), str(llama))
        assert json.loads((out / "config.json").read_text())["model_type"] == kind
        assert (out / INDEXER_WEIGHTS).exists() == (kind != "llama")


@pytest.mark.parametrize(
    ("place", "held"),
    [("notes.txt", "notes.txt"), ("tokenizer.json/thesis.txt", "tokenizer.json/thes")],
)
def test_what_somebody_put_there_is_kept(llama, out, place, held):
    build.build(out, Recipe(), str(llama))
    mine = out / place
    if not mine.parent.is_dir():
        mine.parent.unlink()
        mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(ValueError, match=f"is not a folder .* it holds {held}"):
        build.build(out, Recipe(), str(llama))
    assert mine.read_text() == "mine"


def test_a_model_that_this_script_did_not_write_is_kept(llama, out):
    write_llama(out)
    with pytest.raises(ValueError, match="is not a folder that this script wrote"):
        build.build(out, Recipe(), str(llama))
    assert "written_by" not in json.loads((out / "config.json").read_text())


def test_stopped_between_the_old_folder_and_the_new_one(llama, out, monkeypatch):
    build.build(out, Recipe(index_topk=5), str(llama))
    rename = build.Path.rename

    def stopped(path, target):
        if path.name == "new":
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(build.Path, "rename", stopped)
    with pytest.raises(KeyboardInterrupt):
        build.build(out, Recipe(index_topk=9), str(llama))
    assert json.loads((out / "config.json").read_text())["index_topk"] == 5


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"attention_bias": True}, "it has attention_bias"),
        ({"mlp_bias": True}, "it has mlp_bias"),
        ({"rope_traditional": True}, "it has rope_traditional"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "it has rope_scaling"),
        ({"head_dim": 32}, "it has head_dim"),
        ({"max_position_embeddings": None}, "lacks max_position_embeddings"),
        (
            {
                "sliding_window": 8,
                "layer_types": ["sliding_attention"] + ["full_attention"] * 6,
            },
            "it has sliding_window",
        ),
    ],
    ids=str,
)
def test_a_llama_that_these_kinds_cannot_express_is_refused(
    tmp_path, out, facts, words
):
    llama = write_llama(tmp_path.parent / f"odd-{tmp_path.name}", **facts)
    with pytest.raises(ValueError, match=words):
        build.build(out, Recipe(), str(llama))
    assert not out.exists()


def test_a_quantised_llama_is_refused(tmp_path, out):
    facts = {**small_models.LLAMA, **FACTS, "intermediate_size": 64}
    model = small_models.make_llama(**facts)
    nn.quantize(model, group_size=32, bits=4)
    facts["quantization"] = {"group_size": 32, "bits": 4}
    llama = tmp_path.parent / f"quantised-{tmp_path.name}"
    small_models.save_folder(llama, facts, model)
    for kind in ("llama", "deepseek_v32"):
        with pytest.raises(ValueError, match="is quantised"):
            build.build(out, Recipe(kind), str(llama))


@pytest.mark.parametrize("latent", [1.0, float("nan")])
def test_a_checkpoint_that_differs_from_the_llama_is_not_written(
    llama, out, monkeypatch, latent
):
    """With 1 the norms of latents divide once more; NaN is no number that is small."""
    monkeypatch.setattr(mla, "LATENT", latent)
    # So that the first norm's epsilon matters, which the second one undoes.
    path = llama / "model.safetensors"
    weights = dict(mx.load(str(path)))
    weights["model.embed_tokens.weight"] *= 1e-3
    mx.eval(weights)  # read from the file that is written next
    mx.save_safetensors(str(path), weights, {"format": "mlx"})
    with pytest.raises(RuntimeError, match="its logits differ from the llama's by"):
        build.build(out, Recipe(), str(llama))
    assert not out.exists()


def test_a_conversion_that_another_build_has_finished_first(tmp_path):
    folder = tmp_path / "model"

    def convert(unfinished):
        for copy in (unfinished, folder):
            copy.mkdir(exist_ok=True)
            (copy / "weights").write_text("the same")

    assert build.once(folder, convert, print) == folder
    assert (folder / "weights").read_text() == "the same"
    assert list(tmp_path.iterdir()) == [folder]
