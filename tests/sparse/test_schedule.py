"""What a configuration says of the indexers, and what it can't say."""

import pytest

import small_models
from mlx_sinks.sparse.schedule import (
    CheckpointError,
    indexer_interleaves,
    indexer_schedule,
)

GLM52 = small_models.glm52()


def kinds(text):
    return tuple({"F": "full", "S": "shared"}[letter] for letter in text)


def test_the_list_goes_before_pattern_and_frequency():
    stated = {"indexer_types": ["full", "shared", "full"], "num_hidden_layers": 3}
    assert indexer_schedule(stated) == kinds("FSF")
    more = {"index_topk_pattern": "FFS", "index_topk_freq": 2}
    assert indexer_schedule({**stated, **more}) == kinds("FSF")
    assert indexer_schedule({**stated, **more, "indexer_types": None}) == kinds("FFS")


def test_glm_52_in_both_forms():
    schedule = indexer_schedule(GLM52)
    assert (schedule.count("full"), schedule.count("shared")) == (21, 57)
    spaced = {"index_topk_freq": 4, "index_skip_topk_offset": 3}
    assert indexer_schedule({"num_hidden_layers": 78, **spaced}) == schedule


@pytest.mark.parametrize(
    ("freq", "offset", "expected"),
    [
        (1, None, None),
        (0, None, None),
        (None, None, None),
        (2, None, "FFSFSFSF"),  # the reference's offset of 2
        (4, None, "FFSSSFSS"),
        (4, 3, "FFFSSSFS"),
        (3, 1, "FSSFSSFS"),
        (3, 0, "SSFSSFSS"),
        (9, 8, None),
    ],
)
def test_the_frequency_and_its_offset(freq, offset, expected):
    stated = {"index_topk_freq": freq, "index_skip_topk_offset": offset}
    config = {"num_hidden_layers": 8, **stated}
    if expected and expected.startswith("S"):
        with pytest.raises(CheckpointError, match="first layer as shared"):
            indexer_schedule(config)
    else:
        assert indexer_schedule(config) == (kinds(expected) if expected else None)


def test_a_pattern_of_letters_or_words():
    for pattern in ("FFS", ["full", "full", "shared"], ["F", "full", "S"]):
        config = {"num_hidden_layers": 3, "index_topk_pattern": pattern}
        assert indexer_schedule(config) == kinds("FFS")


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({"indexer_types": ["shared", "full"]}, "indexer_types marks the first layer"),
        ({"indexer_types": ["full"]}, "1 entries for 2 layers"),
        ({"indexer_types": ["full"] * 3}, "3 entries for 2 layers"),
        ({"indexer_types": []}, "must be a list"),
        ({"indexer_types": {"0": "full"}}, "must be a list"),
        ({"indexer_types": ["full", "half"]}, "layer 1 as 'half'"),
        ({"indexer_types": ["full", None]}, "layer 1 as None"),
        ({"indexer_types": ["full", ["shared"]]}, "layer 1 as"),
        ({"indexer_types": "FS"}, "layer 0 as 'F'"),
        ({"index_topk_pattern": ["F", {}]}, "layer 1 as {}"),
        ({"index_topk_pattern": "FX"}, "layer 1 as 'X'"),
        ({"index_topk_pattern": "SF"}, "index_topk_pattern marks the first layer"),
        ({"index_topk_pattern": 4}, "must be a list"),
        ({"index_topk_freq": -1}, "index_topk_freq must be a whole number >= 0"),
        ({"index_topk_freq": 2.5}, "index_topk_freq must be"),
        ({"index_topk_freq": True}, "index_topk_freq must be"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": -1}, "index_skip_topk_off"),
    ],
)
def test_schedules_that_no_model_can_follow(facts, sentence):
    with pytest.raises(CheckpointError, match=sentence.replace("(", r"\(")):
        indexer_schedule({"num_hidden_layers": 2, **facts})


def test_the_rotary_embedding():
    assert indexer_interleaves({"model_type": "glm_moe_dsa"}) is True
    assert indexer_interleaves({"model_type": "deepseek_v32"}) is False
    assert indexer_interleaves({"model_type": "llama"}) is None
    for kind in small_models.KINDS:
        for stated in (True, False):
            config = {"model_type": kind, "indexer_rope_interleave": stated}
            assert indexer_interleaves(config) is stated


@pytest.mark.parametrize("stated", ["true", "false", "", 2, [], {}])
@pytest.mark.parametrize("kind", small_models.KINDS)
def test_a_convention_that_is_neither_true_nor_false(kind, stated):
    config = {"model_type": kind, "indexer_rope_interleave": stated}
    with pytest.raises(CheckpointError, match="must be true or false"):
        indexer_interleaves(config)
