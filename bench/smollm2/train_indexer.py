"""Distil each layer's attention into an indexer, the model frozen.

    python bench/smollm2/train_indexer.py --model build/smollm2 --out build/trained \\
        --text one.txt another.txt.gz

The warm-up of DeepSeek-V3.2's report: an indexer's scores, after a softmax, are to
match its layer's dense attention, the mean over the heads; the loss is their
Kullback-Leibler divergence in nats. The model reads one stretch after another, each
drawn evenly from one of the texts, and every layer takes some steps with queries of
it. Several seeds of the first weights learn side by side from one pass of the model. An
interrupted run goes on where it was when it is started again. Beside each seed's
weights (quantised) lies a .json with the loss of each stretch, the options, the texts
and the versions.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import KVCache
from rich.progress import Progress, TextColumn

from smollm2.indexers import GROUP_SIZE, Student, new_students, save_trained
from smollm2.llama import load_llama
from smollm2.mla import mla_config
from tools.arguments import count, folder, positive, seed
from tools.blas import restart_with_fast_blas
from tools.output import bars, environment, write_json
from tools.parts import model_files
from tools.script import HelpFormatter, run
from tools.texts import token_ids

SAVE_EVERY = 4  # stretches


def main() -> int:
    restart_with_fast_blas()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="a llama: build.py --kind llama writes one")
    add("--out", type=folder, required=True, help="folder for seed0.safetensors, …")
    add(
        "--text",
        type=Path,
        nargs="+",
        default=[None],
        metavar="FILE",
        help="plain text, or .gz; default: Python's own manual",
    )
    add("--stretches", type=count, default=64, help="of text to read")
    add("--length", type=count, default=2048, help="tokens of each")
    add("--steps", type=count, default=4, help="of AdamW with each")
    add("--queries", type=count, default=128, help="of each step, in every layer")
    add("--rate", type=positive, default=2e-3, help="first learning rate; falls to 0")
    add("--seeds", type=seed, nargs="+", default=[0], help="of the first weights")
    options = parser.parse_args()
    stopped = f"stopped; the same command goes on from the last {SAVE_EVERY} stretches"
    return run("train_indexer.py", lambda: train(options), stopped)


def train(options: argparse.Namespace) -> None:
    """Train, saving the state now and then, and write the weights and the record."""
    if not 1 <= options.queries < options.length:
        raise ValueError(
            f"--queries {options.queries} have to be fewer than --length "
            f"{options.length}"
        )
    model, tokenizer = load_llama(options.model)
    texts = [token_ids(tokenizer, text) for text in options.text]
    for ids, source in texts:
        if len(ids) <= options.length:
            raise ValueError(
                f"{source['text']} has {len(ids)} tokens: too few for --length"
            )
    if model.args.hidden_size % GROUP_SIZE:
        raise ValueError(
            f"a hidden size of {model.args.hidden_size} can't be stored in groups of "
            f"{GROUP_SIZE}"
        )
    names = ("stretches", "length", "steps", "queries", "rate", "seeds")
    facts = {name: getattr(options, name) for name in names}
    facts["texts"] = [source for _, source in texts]
    known = {**facts, "files": model_files(options.model)}
    config = mla_config(vars(model.args), "deepseek_v32")
    steps = options.stretches * options.steps
    learners = [
        [Learner(student, optim.cosine_decay(options.rate, steps)) for student in drawn]
        for drawn in (new_students(config, seed) for seed in options.seeds)
    ]

    partial = options.out / "partial.safetensors"
    losses: list[list[float]] = []
    if (saved := _load_state(partial, known)) is not None:
        state, losses = saved
        for layers, kept in zip(learners, state):
            for learner, arrays in zip(layers, kept):
                learner.state = arrays
    columns = *Progress.get_default_columns(), TextColumn("{task.fields[loss]}")
    with bars(*columns, transient=False) as bar:
        total = options.stretches
        task = bar.add_task("", total=total, completed=len(losses), loss="")
        for number in range(len(losses), total):
            draw = random.Random(number)
            ids, _ = draw.choice(texts)
            start = draw.randrange(len(ids) - options.length)
            tokens = mx.array(ids[start : start + options.length])[None]
            looks = [
                mx.array(sorted(draw.sample(range(1, options.length), options.queries)))
                for _ in range(options.steps)
            ]
            losses.append(distil(model, learners, tokens, looks))
            bar.update(task, advance=1, loss=f"KL {losses[-1][0]:.3f}")
            if len(losses) % SAVE_EVERY == 0:
                _save_state(partial, known, learners, losses)
    for number, layers, curve in zip(options.seeds, learners, zip(*losses)):
        path = options.out / f"seed{number}.safetensors"
        save_trained(path, [learner.student for learner in layers])
        curve = [round(loss, 4) for loss in curve]
        record = {**facts, "seed": number, **environment(), "losses": curve}
        write_json(path.with_suffix(".json"), record)
    partial.unlink(missing_ok=True)


class Learner:
    """A layer's indexer while it is trained."""

    def __init__(self, student: Student, rate: Callable):
        self.student, self.optimizer = student, optim.AdamW(rate)
        self.optimizer.init(student.trainable_parameters())
        self._slope = nn.value_and_grad(student, divergence)

    def learn(self, *look: mx.array) -> mx.array:
        """One step; the loss before it."""
        loss, gradients = self._slope(self.student, *look)
        self.optimizer.update(self.student, gradients)
        mx.eval(loss, self.state)
        return loss

    @property
    def state(self) -> dict:
        return {
            "student": self.student.parameters(),
            "optimizer": self.optimizer.state,
        }

    @state.setter
    def state(self, arrays: dict) -> None:
        self.student.update(arrays["student"])
        self.optimizer.state = arrays["optimizer"]


def distil(
    model: nn.Module,
    learners: list[list[Learner]],
    tokens: mx.array,
    looks: list[mx.array],
) -> list[float]:
    """Let every layer of every seed learn from one stretch; their mean divergences.

    ``tokens`` has shape (1, L); each look names some queries. The hidden states are the
    dense model's: no layer learns from what another layer's indexer drops.
    """
    hidden = model.model.embed_tokens(tokens)
    losses: list[list[mx.array]] = [[] for _ in learners]
    for layer, *students in zip(model.layers, *learners):
        norm = layer.input_layernorm
        x = mx.fast.rms_norm(hidden, None, norm.eps)[0]  # its weight is folded away
        for queries in looks:
            target = attention_weights(layer.self_attn, norm(hidden), queries)
            for student, loss in zip(students, losses):
                loss.append(student.learn(x, queries, target))
        hidden = in_parts(layer, hidden)
        mx.eval(hidden)
    return [mx.array(loss).mean().item() for loss in losses]


def in_parts(layer: nn.Module, hidden: mx.array, size: int = 128) -> mx.array:
    """A causal layer's output; one call would score the hidden keys, too."""
    cache = KVCache()
    starts = range(0, hidden.shape[1], size)
    parts = [layer(hidden[:, at : at + size], "causal", cache) for at in starts]
    return mx.concatenate(parts, axis=1)


def attention_weights(attention: nn.Module, x: mx.array, queries: mx.array) -> mx.array:
    """What some queries pay to each column, the mean over heads: (queries, L)."""
    _, L, _ = x.shape
    H, G = attention.n_heads, attention.n_kv_heads
    q = attention.rope(attention.q_proj(x).reshape(1, L, H, -1).swapaxes(1, 2))
    k = attention.rope(attention.k_proj(x).reshape(1, L, G, -1).swapaxes(1, 2))
    k = mx.repeat(k, H // G, axis=1)
    logits = q[0][:, queries] @ k[0].swapaxes(-1, -2) * attention.scale
    return mx.softmax(mx.where(_seen(queries, L), logits, -mx.inf), axis=-1).mean(
        axis=0
    )


def divergence(
    student: Student, x: mx.array, queries: mx.array, target: mx.array
) -> mx.array:
    """KL of the student's scores from a (queries, L) target, the mean over queries."""
    seen = _seen(queries, x.shape[0])
    scores = mx.where(seen, student(x, queries), -mx.inf)
    log_student = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
    terms = target * (mx.log(mx.maximum(target, 1e-30)) - log_student)
    return mx.where(seen, terms, 0).sum(axis=-1).mean()


def _seen(queries: mx.array, L: int) -> mx.array:
    return queries[:, None] >= mx.arange(L)


def _save_state(
    path: Path,
    facts: dict,
    learners: list[list[Learner]],
    losses: list[list[float]],
) -> None:
    unfinished = path.with_suffix(".unfinished.safetensors")
    notes = {"facts": json.dumps(facts), "losses": json.dumps(losses)}
    state = [[learner.state for learner in layers] for layers in learners]
    mx.save_safetensors(str(unfinished), dict(tree_flatten(state)), notes)
    unfinished.replace(path)


def _load_state(path: Path, facts: dict) -> tuple[list, list[list[float]]] | None:
    if not path.exists():
        return None
    arrays, notes = mx.load(str(path), return_metadata=True)
    if json.loads(notes["facts"]) != facts:
        raise ValueError(f"{path} is of a run with other options; remove it first")
    return tree_unflatten(list(arrays.items())), json.loads(notes["losses"])


if __name__ == "__main__":
    sys.exit(main())
