"""What is said of a recording: by layer, by skill, as JSON."""

import json

import numpy as np
import pytest

from mlx_sinks import Recording, SinkPolicy
from mlx_sinks.probing import report
from mlx_sinks.probing import skill as choosing
from mlx_sinks.probing.coverage import METRICS


def recording_of(masses, layers=3):
    """One block a column; mass_best 0.9 and mass_chance 0.1 throughout."""
    names = [f"model.layers.{number}.self_attn" for number in range(layers)]
    recording = Recording(names, 16, SinkPolicy(2, 3), 4)
    for layer, row in enumerate(masses):
        for place, mass in enumerate(row):
            if mass is not None:
                figures = {"mass": mass, "mass_best": 0.9, "mass_chance": 0.1}
                recording.add(
                    layer,
                    16 + 4 * place,
                    np.array([figures.get(name, np.nan) for name in METRICS]),
                )
    return recording


def test_a_recording_as_json():
    recording = recording_of([[0.25, None], [0.5, 0.75], [None, None]])
    text = json.dumps(report.as_dict(recording), allow_nan=False)
    assert text.count("null") >= 3
    for part in (*recording.layers, *METRICS, "0.25", "0.75", "16"):
        assert part in text


def test_by_layer_is_the_average_over_blocks():
    means = report.by_layer(recording_of([[0.2, 0.4], [0.5, 0.7], [0.9, 0.9]]))
    assert set(means) == set(METRICS)
    np.testing.assert_allclose(means["mass"], [0.3, 0.6, 0.9], atol=1e-6)


def test_skill_is_0_by_chance_and_1_at_best():
    means = report.by_layer(recording_of([[0.1, 0.1], [0.9, 0.9], [0.5, 0.5]]))
    np.testing.assert_allclose(choosing.skill(means), [0, 1, 0.5], atol=1e-6)


def test_suspects_are_below_healthy_and_the_worst_comes_first():
    skills = [0.5, 1.0, choosing.HEALTHY + 0.01, -0.1, choosing.HEALTHY - 0.01]
    masses = [[0.1 + 0.8 * skill] for skill in skills]
    means = report.by_layer(recording_of(masses, layers=5))
    assert choosing.suspects(means) == [3, 0, 4]


def test_a_layer_that_was_not_seen_is_no_suspect():
    means = report.by_layer(recording_of([[0.5], [None], [0.9]]))
    assert choosing.suspects(means) == [0]


@pytest.mark.parametrize(
    ("names", "short"),
    [
        ([f"model.layers.{n}.self_attn" for n in (0, 7, 10)], ["0", "7", "10"]),
        ([f"layers.{n}.attn" for n in (10, 11)], ["10", "11"]),
        (["model.layers.0.attn_a", "model.layers.1.attn_b"], ["0.attn_a", "1.attn_b"]),
    ],
)
def test_labels_are_what_names_do_not_share(names, short):
    assert choosing.labels(names) == short


@pytest.mark.parametrize(
    "names", [["model.layers.7.self_attn"], ["mtp.attn", "model.layers.3.attn"]]
)
def test_labels_tell_layers_apart_whatever_their_names(names):
    labels = choosing.labels(names)
    assert len(set(labels)) == len(names)
    assert all(label and label in name for label, name in zip(labels, names))
