"""``mlx-sinks probe`` as a user sees it."""

import json
from importlib.util import find_spec

import pytest

import small_models
from processes import command, run

TEXT = "The quick brown fox jumps over the lazy dog, again and again. " * 2
PICTURES = find_spec("matplotlib") is not None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_models.write_folder(tmp_path_factory.mktemp("dsa") / "model")


@pytest.fixture(scope="module")
def probed(folder, tmp_path_factory):
    """A run with ``--out``, at 80 columns, and the folder that it wrote."""
    out = tmp_path_factory.mktemp("probe")
    (out / "text.txt").write_text(TEXT)
    words = ("probe", "--model", folder, "--text", out / "text.txt", "--tokens", 100)
    return run(command("mlx-sinks"), *words, "--out", out, COLUMNS="80"), out


def test_it_says_what_it_does_and_what_it_wrote(folder, probed):
    outcome, out = probed
    assert outcome.status == 0, outcome.stderr
    first, *others = outcome.stderr.splitlines()
    if not PICTURES:  # before the work, not after it
        assert "no picture without matplotlib" in first
        first = others[0]
    assert first == f"mlx-sinks: loading {folder}"
    wrote = "probe.json and probe.png" if PICTURES else "probe.json"
    assert others[-1] == f"mlx-sinks: wrote {wrote} to {out}"


def test_its_table_fits_a_terminal(probed):
    lines = probed[0].stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line[0] == "│" != line[-1]] == []
    assert "…" not in probed[0].stdout
    assert "guarantee" in probed[0].stdout
    assert "a skill below 0.75, worst first: " in probed[0].stdout


@pytest.mark.skipif(not PICTURES, reason="no matplotlib")
def test_the_picture_is_drawn_again(probed):
    _, out = probed
    picture = out / "probe.png"
    first = picture.read_bytes()
    picture.unlink()
    again = run(command("mlx-sinks"), "probe", "--plot", out / "probe.json")
    assert (again.status, again.stdout) == (0, "")
    assert again.stderr == f"mlx-sinks: wrote {picture}\n"
    assert picture.read_bytes() == first


@pytest.mark.skipif(not PICTURES, reason="no matplotlib")
def test_the_picture_marks_what_the_table_names(probed):
    from mlx_sinks.probing.picture import draw_written

    facts = json.loads((probed[1] / "probe.json").read_text())
    figure = draw_written(facts)
    axes = figure.axes[0]
    assert [a.get_title() for a in figure.axes[:2]] == ["skill", "sinks kept"]
    red = [
        label.get_text()
        for label in axes.get_yticklabels()
        if label.get_color() == "red"
    ]
    assert len(red) == len(facts["suspects"]) > 0
    assert "have a skill below 0.75 (red)" in figure.get_suptitle()
    width, height = figure.get_size_inches() * 120
    assert width <= 1400 and height / width > 0.3


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "probe what?"),
        (["--model", "x", "--plot", "y"], "probe what?"),
        (["--plot", "gone.json"], "No such file"),
        (["--plot", "other.json"], "it is no probe.json"),
        (["--plot", "damaged.json"], "is damaged"),
    ],
)
def test_what_cannot_be_gets_a_sentence(tmp_path, words, sentence):
    (tmp_path / "other.json").write_text('{"layers": []}')
    (tmp_path / "damaged.json").write_text("{")
    outcome = run(command("mlx-sinks"), "probe", *words, cwd=tmp_path)
    assert outcome.status != 0
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("mlx-sinks: ")
    assert sentence in line or "no picture without matplotlib" in line
