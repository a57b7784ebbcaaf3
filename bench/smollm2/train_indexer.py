"""Distil each layer's attention into its indexer, the model frozen.

    python bench/smollm2/train_indexer.py --model build/smollm2-dsa-256 \\
        --out build/trained

The warm-up of DeepSeek-V3.2's report: an indexer's scores, after a softmax, are to
match its layer's dense attention, summed over the heads and normalised; the loss is
their Kullback-Leibler divergence in nats. Several seeds of the first weights learn side
by side from one pass of the model. An interrupted run goes on where it was when it is
started again. Beside each seed's weights (float16) lies a .json with the loss curve,
the options, the text and the versions.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten
from rich.progress import Progress, TextColumn

import mlx_sinks
from smollm2.build import random_indexers
from smollm2.zoo import load_model
from tools.arguments import count, folder, positive, seed
from tools.blas import restart_with_fast_blas
from tools.internals import watching
from tools.output import bars, environment, write_json
from tools.parts import model_files
from tools.script import HelpFormatter, run
from tools.texts import token_ids

SAVE_EVERY = 20  # steps


def main() -> int:
    restart_with_fast_blas()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="folder written by build.py")
    add("--out", type=folder, required=True, help="folder for seed0.safetensors, …")
    add("--text", type=Path, help="plain text, or .gz; default: Python's own manual")
    add("--steps", type=count, default=150, help="of AdamW")
    add("--length", type=count, default=1024, help="tokens of a step")
    add("--rate", type=positive, default=2e-3, help="first learning rate; falls to 0")
    add("--seeds", type=seed, nargs="+", default=[0], help="of the first weights")
    options = parser.parse_args()
    stopped = f"stopped; the same command goes on from the last {SAVE_EVERY} steps"
    return run("train_indexer.py", lambda: train(options), stopped)


def train(options: argparse.Namespace) -> None:
    """Train, saving the state now and then, and write the weights and the record."""
    if options.length < 2:
        raise ValueError(f"--length {options.length}: from one token nothing is learnt")
    model, tokenizer = load_model(options.model)
    ids, source = token_ids(tokenizer, options.text)
    if len(ids) <= options.length:
        raise ValueError(f"the text has {len(ids)} tokens: too few for --length")
    names = ("steps", "length", "rate", "seeds")
    facts = {**{name: getattr(options, name) for name in names}, **source}
    known = {**facts, "files": model_files(options.model)}
    students = [Student(model, seed) for seed in options.seeds]
    rate = optim.cosine_decay(options.rate, options.steps)
    optimizers = [optim.AdamW(rate) for _ in students]
    for optimizer, student in zip(optimizers, students):
        optimizer.init(student.trainable_parameters())
    draw = random.Random(0)
    starts = [draw.randrange(len(ids) - options.length) for _ in range(options.steps)]

    partial = options.out / "partial.safetensors"
    losses: list[list[float]] = []
    if (saved := _load_state(partial, known)) is not None:
        state, losses = saved
        for student, weights in zip(students, state["students"]):
            student.update(weights)
        for optimizer, moments in zip(optimizers, state["optimizers"]):
            optimizer.state = moments
    columns = *Progress.get_default_columns(), TextColumn("{task.fields[loss]}")
    bar = bars(*columns, transient=False)
    with bar, mlx_sinks.patched(mlx_sinks.SinkPolicy(0, 0)):
        task = bar.add_task("", total=options.steps, completed=len(losses), loss="")
        for start in starts[len(losses) :]:
            tokens = mx.array(ids[start : start + options.length])[None]
            loss, gradients = distillation(model, students, tokens)
            for number, optimizer in enumerate(optimizers):
                optimizer.update(students[number], gradients[number])
            state = {
                "students": [student.parameters() for student in students],
                "optimizers": [optimizer.state for optimizer in optimizers],
            }
            mx.eval(loss, state)
            losses.append(loss.tolist())
            bar.update(task, advance=1, loss=f"KL {losses[-1][0]:.3f}")
            if len(losses) % SAVE_EVERY == 0:
                _save_state(partial, known, state, losses)
    for number, student, curve in zip(options.seeds, students, zip(*losses)):
        path = options.out / f"seed{number}.safetensors"
        mx.save_safetensors(str(path), student.weights(), {"format": "mlx"})
        curve = [round(loss, 4) for loss in curve]
        record = {**facts, "seed": number, **environment(), "losses": curve}
        write_json(path.with_suffix(".json"), record)
    partial.unlink(missing_ok=True)


class Student(nn.Module):
    """One indexer for each layer of a model, random as build.py would make them."""

    def __init__(self, model: nn.Module, seed: int):
        super().__init__()
        self.layers = [model.args.indexer() for _ in model.layers]
        weights = random_indexers(vars(model.args), seed)
        self.load_weights([(_short(name), weight) for name, weight in weights.items()])
        for indexer in self.layers:
            indexer.index_topk = 1  # so that it scores from the second token on

    def weights(self) -> dict[str, mx.array]:
        """In float16, by their names in the model."""
        return {
            _long(name): weight.astype(mx.float16)
            for name, weight in tree_flatten(self.parameters())
        }


def _short(name: str) -> str:
    """``model.layers.7.self_attn.indexer.wk.weight`` as ``layers.7.wk.weight``."""
    return name.removeprefix("model.").replace(".self_attn.indexer", "")


def _long(name: str) -> str:
    layers, number, part = name.split(".", 2)
    return f"model.{layers}.{number}.self_attn.indexer.{part}"


def distillation(
    model: nn.Module, students: list[Student], tokens: mx.array
) -> tuple[mx.array, list[dict]]:
    """Each student's mean divergence over layers and queries, and its gradients.

    ``tokens`` has shape (1, L). The hidden states are the dense model's: no layer
    learns from what another layer's indexer drops.
    """
    hidden = model.model.embed_tokens(tokens)
    mask = mx.tri(tokens.shape[1], dtype=mx.bool_)
    losses: list[list[mx.array]] = [[] for _ in students]
    gradients: list[dict] = [{"layers": []} for _ in students]
    for number, layer in enumerate(model.layers):
        x = layer.input_layernorm(hidden)
        weights, output = dense_attention(layer.self_attn, x, mask)
        target = mx.stop_gradient(weights.mean(axis=1))
        for student, loss, gradient in zip(students, losses, gradients):
            step = nn.value_and_grad(student.layers[number], divergence)
            here, slope = step(student.layers[number], x, mask, target)
            loss.append(here)
            gradient["layers"].append(slope)
        hidden = hidden + output
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return mx.array([sum(loss) / len(loss) for loss in losses]), gradients


def dense_attention(
    attention: nn.Module, x: mx.array, mask: mx.array
) -> tuple[mx.array, mx.array]:
    """Weights (B, H, L, L), and the output that the layer has without its indexer."""
    B, L, _ = x.shape
    H, G = attention.n_heads, attention.n_kv_heads
    queries = attention.q_proj(x).reshape(B, L, H, -1).swapaxes(1, 2)
    keys = attention.k_proj(x).reshape(B, L, G, -1).swapaxes(1, 2)
    values = attention.v_proj(x).reshape(B, L, G, -1).swapaxes(1, 2)
    queries, keys = attention.rope(queries), attention.rope(keys)
    keys, values = mx.repeat(keys, H // G, axis=1), mx.repeat(values, H // G, axis=1)
    logits = queries @ keys.swapaxes(-1, -2) * attention.scale
    weights = mx.softmax(mx.where(mask, logits, -mx.inf), axis=-1)
    output = (weights @ values).swapaxes(1, 2).reshape(B, L, -1)
    return weights, attention.o_proj(output)


def divergence(
    indexer: nn.Module, x: mx.array, mask: mx.array, target: mx.array
) -> mx.array:
    """KL of the indexer's scores from a (B, L, L) target, the mean over queries."""
    seen: list[mx.array] = []
    with watching(lambda scores, *_: seen.append(scores)):
        indexer(x, x, mask)
    scores = mx.where(mask, seen[0][:, 0], -mx.inf)
    log_student = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
    terms = target * (mx.log(mx.maximum(target, 1e-30)) - log_student)
    return mx.where(mask, terms, 0).sum(axis=-1).mean()


def _save_state(
    path: Path, facts: dict, state: dict, losses: list[list[float]]
) -> None:
    unfinished = path.with_suffix(".unfinished.safetensors")
    notes = {"facts": json.dumps(facts), "losses": json.dumps(losses)}
    mx.save_safetensors(str(unfinished), dict(tree_flatten(state)), notes)
    unfinished.replace(path)


def _load_state(path: Path, facts: dict) -> tuple[dict, list[list[float]]] | None:
    if not path.exists():
        return None
    arrays, notes = mx.load(str(path), return_metadata=True)
    if json.loads(notes["facts"]) != facts:
        raise ValueError(f"{path} is of a run with other options; remove it first")
    return tree_unflatten(list(arrays.items())), json.loads(notes["losses"])


if __name__ == "__main__":
    sys.exit(main())
