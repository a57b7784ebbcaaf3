"""``mlx_lm.server`` with the variable set: batches, the prompt cache, a dead policy."""

import re
from contextlib import nullcontext
from importlib.metadata import version

import mlx_lm
import pytest
from packaging.version import Version

import mlx_sinks
import small_models
from processes import LIMIT, serving_model

INDEX_TOPK = 32
POLICY = mlx_sinks.SinkPolicy(sinks=4, recency=8)
VALUE = "sinks=4,recency=8"
PROMPTS = (
    "The quick brown fox jumps over the lazy dog.",
    "Pack my box with five dozen liquor jugs, said the wizard to the judge; "
    "how vexingly quick daft zebras jump over the sphinx of black quartz.",
)
MAX_TOKENS = 24


class Model(small_models.Folder):
    """A model folder, and how the same model writes in this process."""

    def alone(self, prompt, policy):
        """The text of one prompt, generated in this process."""
        with mlx_sinks.patched(policy) if policy else nullcontext():
            return mlx_lm.generate(*mlx_lm.load(self.folder), prompt, **self.options)


@pytest.fixture(scope="module", params=small_models.KINDS)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    small_models.write_folder(folder, request.param, INDEX_TOPK)
    return Model(str(folder), mlx_lm.load(str(folder))[1], MAX_TOKENS)


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    log = tmp_path_factory.mktemp("server")
    with serving_model(log, model.folder, MLX_SINKS=VALUE) as running:
        yield running


def sequences_in_cache(server):
    """As the server logs it whenever it takes a request up."""
    found = re.findall(r"Prompt Cache: (\d+) sequences", server.log().stderr)
    return [int(number) for number in found]


def test_two_prompts_at_once_get_the_text_of_each_alone(server, model):
    texts = model.complete_together(server, PROMPTS)
    assert texts == [model.alone(prompt, POLICY) for prompt in PROMPTS]
    assert texts != [model.alone(prompt, None) for prompt in PROMPTS]
    # None of the two had ended when the other was taken up.
    before, after = sequences_in_cache(server)[-2:]
    assert before == after


def test_a_reused_prefix_gives_the_text_of_the_whole_prompt(server, model):
    text, _ = model.complete(server, PROMPTS[0])
    longer = PROMPTS[0] + text + PROMPTS[1]
    continued, cached = model.complete(server, longer)
    assert len(PROMPTS[0]) < cached < len(longer)
    assert continued == model.alone(longer, POLICY)
    assert continued != model.alone(longer, None)


def test_one_line_says_what_is_kept(server, model):
    model.complete(server, PROMPTS[0])
    (line,) = (line for line in server.log().ours if str(POLICY) in line)
    assert f"mlx-lm {version('mlx-lm')}" in line


def test_a_policy_that_can_not_hold_ends_the_service(tmp_path):
    folder = small_models.write_folder(tmp_path / "model", index_topk=INDEX_TOPK)
    with serving_model(tmp_path, folder, MLX_SINKS=f"sinks={INDEX_TOPK}") as server:
        with pytest.raises(ConnectionError):
            server.complete(prompt="short")
        if Version(version("mlx-lm")) < Version("0.32.0"):
            # Its generation thread has died, and it would wait for it for ever.
            assert server.process.wait(LIMIT) == 1
        else:
            assert server.get("/health") == 503
        assert f"sinks={INDEX_TOPK} must be smaller" in server.log().stderr
