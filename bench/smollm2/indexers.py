"""The indexers of SmolLM2 as a DeepSeek model: random, trained, and made sick."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import deepseek_v32

HEADS = 4
TRAINED = Path(__file__).parent / "trained" / "seed0.safetensors"
# Trained weights are stored with so many bits, in groups of as many values.
BITS, GROUP_SIZE = 6, 64
QUANTISED = ("values", "scales", "biases")


class Student(nn.Module):
    """One layer's indexer without the dims that stay zero: what is trained of it.

    Upstream rotates as many dims of an indexer as of attention. In this model these are
    one after another the dims of three groups of heads; an indexer needs one group's.

    Parameters
    ----------
    hidden : int
        Size of the hidden state.
    used : int
        Dims of one group, all rotated by halves.
    dims : int
        Dims of the whole indexer.
    base : float
        Of the rotary frequencies of one group.
    """

    def __init__(self, hidden: int, used: int, dims: int, base: float):
        super().__init__()
        self.wq_b = nn.Linear(hidden, HEADS * used, bias=False)
        self.wk = nn.Linear(hidden, used, bias=False)
        self.k_norm = nn.LayerNorm(used)
        self.weights_proj = nn.Linear(hidden, HEADS, bias=False)
        self._rope = nn.RoPE(used, base=base)
        self._used, self._dims = used, dims

    def __call__(self, x: mx.array, rows: mx.array) -> mx.array:
        """Scores (len(rows), T) of some queries of the hidden states ``x``, (T, D)."""
        used, dims = self._used, self._dims
        queries = self.wq_b(x).reshape(-1, HEADS, used).swapaxes(0, 1)
        # The layer norm is over all dims, those that are zero included.
        keys = mx.pad(self.wk(x), [(0, 0), (0, dims - used)])
        keys = mx.fast.layer_norm(keys, None, None, self.k_norm.eps)[:, :used]
        keys = keys * self.k_norm.weight + self.k_norm.bias
        queries, keys = self._rope(queries)[:, rows], self._rope(keys[None])
        scores = mx.maximum(queries @ keys.swapaxes(-1, -2), 0)
        weights = self.weights_proj(x[rows]) * (HEADS * dims) ** -0.5
        return (scores * weights.T[..., None]).sum(axis=0)

    def padded(self) -> dict[str, mx.array]:
        """The weights of upstream's Indexer that gives the same scores."""
        parameters = dict(tree_flatten(self.parameters()))
        return {name: self._padded(name, w) for name, w in parameters.items()}

    def _padded(self, name: str, weight: mx.array) -> mx.array:
        if name.startswith("weights_proj"):
            return weight
        rows = weight.reshape(-1, 2, self._used // 2, *weight.shape[1:])
        room = (self._dims - self._used) // 2
        rows = mx.pad(rows, [(0, 0), (0, 0), (0, room)] + [(0, 0)] * (weight.ndim - 1))
        return rows.reshape(-1, *weight.shape[1:])


def indexer_config(config: dict, index_topk: int) -> dict:
    """What a DeepSeek configuration says of its indexers."""
    dims = config["qk_rope_head_dim"]
    return {"index_n_heads": HEADS, "index_head_dim": dims, "index_topk": index_topk}


def new_students(config: dict, seed: int) -> list[Student]:
    """Random ones for all layers of a DeepSeek configuration."""
    mx.random.seed(seed)
    used, dims = config["v_head_dim"], config["qk_rope_head_dim"]
    return [
        Student(config["hidden_size"], used, dims, config["rope_theta"])
        for _ in range(config["num_hidden_layers"])
    ]


def save_trained(file: Path, students: list[Student]) -> None:
    """Write the students of all layers, their matrices quantised."""
    weights = {}
    for number, student in enumerate(students):
        for name, weight in tree_flatten(student.parameters()):
            name, weight = f"{number}.{name}", weight.astype(mx.float16)
            if weight.ndim == 1:
                weights[name] = weight
                continue
            parts = mx.quantize(weight, group_size=GROUP_SIZE, bits=BITS)
            weights |= {f"{name}.{part}": w for part, w in zip(QUANTISED, parts)}
    mx.save_safetensors(str(file), weights, {"format": "mlx"})


def trained_indexers(config: dict, file: Path) -> dict[str, mx.array]:
    """What ``save_trained`` has written, by names in the model, in float32.

    Raises
    ------
    OSError, ValueError
        No such file, or one of other indexers than this model's.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; train_indexer.py writes it")
    held, found = mx.load(str(file)), {}
    try:
        for number, student in enumerate(new_students(config, 0)):
            for name, weight in tree_flatten(student.parameters()):
                stem, shape = f"{number}.{name}", weight.shape
                if weight.ndim == 1:
                    weight = held.pop(stem)
                else:
                    parts = (held.pop(f"{stem}.{part}") for part in QUANTISED)
                    weight = mx.dequantize(*parts, group_size=GROUP_SIZE, bits=BITS)
                if weight.shape != shape:
                    raise ValueError
                student.update(tree_unflatten([(name, weight.astype(mx.float32))]))
            found |= in_model(number, student.padded())
        if held:
            raise ValueError
    except (KeyError, ValueError):
        raise ValueError(
            f"{file} is no file of train_indexer.py for the indexers of this model"
        ) from None
    return found


def random_indexers(config: dict, seed: int) -> dict[str, mx.array]:
    """Upstream's own initialisation of an Indexer in every layer."""
    args = deepseek_v32.ModelArgs.from_dict(config)
    mx.random.seed(seed)
    found = {}
    for number in range(args.num_hidden_layers):
        found |= in_model(
            number, dict(tree_flatten(deepseek_v32.Indexer(args).parameters()))
        )
    return found


def in_model(layer: int, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """The names that a layer's indexer has in the model, before the weights."""
    stem = f"model.layers.{layer}.self_attn.indexer"
    return {f"{stem}.{name}": weight for name, weight in weights.items()}


def layer_of(name: str) -> int:
    """The number of the layer in a name of ``in_model``."""
    return int(name.split(".")[2])


def flipped(config: dict, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Rows ordered as if neighbours rotated together; upstream rotates halves."""
    half = config["index_head_dim"] // 2

    def reordered(weight: mx.array) -> mx.array:
        rows = weight.reshape(-1, 2, half, *weight.shape[1:])
        return rows.swapaxes(1, 2).reshape(weight.shape)

    return {
        name: weight if "weights_proj" in name else reordered(weight)
        for name, weight in weights.items()
    }
