"""Hub ids: what mlx-lm's download leaves on this disk is found, without a network."""

import json
import socket
from hashlib import sha256
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

import small_models
from mlx_sinks import cli
from mlx_sinks.upstream.hub import local_snapshot

NAME = "somebody/a-model"
COMMIT = "0123456789abcdef" * 2 + "01234567"
# Files that a repository has and mlx-lm doesn't fetch.
NOT_FETCHED = (".gitattributes", "README.md", "original/consolidated.pth")
INDEX = "model.safetensors.index.json"


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """A cache of its own, and no way to the network."""

    def refuse(*_):
        raise AssertionError("asked the network")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A checkpoint of two files of weights and their index, each by its name."""
    folder = small_models.write_folder(tmp_path_factory.mktemp("model"), "glm_moe_dsa")
    found = {file.name: file.read_bytes() for file in folder.iterdir()}
    header = json.dumps({"extra": {"dtype": "F32", "shape": [0]}}).encode()
    second = len(header).to_bytes(8, "little") + header
    weights = {"first": "model.safetensors", "extra": "model-2.safetensors"}
    index = json.dumps({"weight_map": weights}).encode()
    return {**found, "model-2.safetensors": second, INDEX: index}


@pytest.fixture
def downloaded(files, tmp_path):
    """Lays a repository out as huggingface_hub caches it; its snapshot's folder.

    Its list has all that the repository has, with those that weren't fetched.
    """

    def lay_out(without=(), listed=True, **changed) -> Path:
        root = tmp_path / f"models--{NAME.replace('/', '--')}"
        snapshot = root / "snapshots" / COMMIT
        for folder in (snapshot, root / "blobs", root / "refs", root / "trees"):
            folder.mkdir(parents=True)
        (root / "refs" / "main").write_text(COMMIT)
        there = {**files, **changed}
        for name in there.keys() - {*without}:
            blob = sha256(there[name]).hexdigest()
            (root / "blobs" / blob).write_bytes(there[name])
            (snapshot / name).symlink_to(Path("../../blobs") / blob)
        if listed:
            entries = dict.fromkeys([*there, *NOT_FETCHED], {"size": 1, "blob_id": "0"})
            tree = json.dumps({"format_version": 1, "files": entries})
            (root / "trees" / f"{COMMIT}.json").write_text(tree)
        return snapshot

    return lay_out


@pytest.mark.parametrize("listed", [True, False])
def test_what_mlx_lm_downloads_is_whole(downloaded, listed):
    assert local_snapshot(NAME) is None
    folder = downloaded(listed=listed)
    assert local_snapshot(NAME) == folder
    if listed:  # the list is where huggingface_hub looks for it
        with pytest.raises(LocalEntryNotFoundError, match="README.md"):
            snapshot_download(NAME, local_files_only=True)


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize(
    "without",
    [
        ["model-2.safetensors"],
        ["config.json"],
        [INDEX, "model.safetensors", "model-2.safetensors"],
    ],
)
def test_what_is_not_whole_is_not_there(downloaded, without, listed):
    downloaded(without, listed)
    assert local_snapshot(NAME) is None


def test_weights_whose_content_is_gone_are_not_there(downloaded):
    folder = downloaded(without=[INDEX], listed=False)
    (folder / "model-2.safetensors").resolve().unlink()
    assert local_snapshot(NAME) is None


@pytest.mark.parametrize("name", ["nobody/has-this", "a--b/c", "/", "../..", "", "a/b"])
def test_a_name_of_nothing_is_not_there(downloaded, name):
    downloaded()
    assert local_snapshot(name) is None


def test_an_index_that_can_not_be_read_is_said(downloaded):
    downloaded(**{INDEX: b"{"})
    with pytest.raises(ValueError, match="index.json is damaged"):
        local_snapshot(NAME)


def test_the_doctor_reads_a_download_from_the_disk(downloaded, monkeypatch, capsys):
    def refuse(*_, **__):
        raise AssertionError("asked the hub")

    monkeypatch.setattr("mlx_sinks.doctor.checkpoint_files.HfApi", refuse)
    monkeypatch.setattr("mlx_sinks.doctor.checkpoint_files.hf_hub_download", refuse)
    downloaded()
    monkeypatch.setenv("MLX_SINKS", "sinks=4,recency=6")
    assert cli.main(["doctor", "--model", NAME, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["model"]["layers_with_indexer_weights"] == 2
