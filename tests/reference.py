"""deepseek_v32 and glm_moe_dsa from token ids to logits, in plain NumPy float64.

Written from the published architecture (DeepSeek-V3.2: latent attention with a
lightning indexer, experts behind bias-corrected sigmoid gates; GLM-5: the same, with
layers that share a selection). One sequence, all of it at once, no caches: position and
column are the same number, and T = L. `weights` bear the names of an unquantised MLX
checkpoint, `config` is its config.json.
"""

import numpy as np

# Of the indexer's LayerNorm and of the two latent RMSNorms; config.json has neither.
INNER_EPS = 1e-6


def logits(weights, config, tokens, sinks=0, recency=0):
    """(L, vocab_size), with `sinks` and `recency` forced into each selection."""
    return _forward(weights, config, tokens, sinks, recency)[0]


def selections(weights, config, tokens, sinks=0, recency=0):
    """One a layer: bool (L, T), the columns attended to, or None where dense."""
    return _forward(weights, config, tokens, sinks, recency)[1]


def _forward(weights, config, tokens, sinks, recency):
    model, eps = under(weights, "model."), config["rms_norm_eps"]
    hidden = model["embed_tokens.weight"][list(tokens)].astype(np.float64)
    selected = []
    for i, owns_indexer in enumerate(full_layers(config)):
        w = under(model, f"layers.{i}.")
        x = rms_norm(hidden, w["input_layernorm.weight"], eps)
        qr = compressed_queries(under(w, "self_attn."), x)
        if owns_indexer:
            scores = index_scores(under(w, "self_attn.indexer."), config, x, qr)
            columns = select(scores, config["index_topk"], sinks, recency)
        selected.append(columns)
        hidden = hidden + attention(under(w, "self_attn."), config, x, qr, columns)
        x = rms_norm(hidden, w["post_attention_layernorm.weight"], eps)
        mlp = experts if has_experts(config, i) else feed_forward
        hidden = hidden + mlp(under(w, "mlp."), config, x)
    hidden = rms_norm(hidden, model["norm.weight"], eps)
    return linear(weights, "lm_head", hidden), selected


def full_layers(config):
    """One bool a layer: True where it selects, False where it reuses a selection."""
    layers = range(config["num_hidden_layers"])
    if config["model_type"] == "deepseek_v32":
        return [True for _ in layers]
    words = config.get("indexer_types") or config.get("index_topk_pattern")
    if words:
        full = [words[i][0].lower() == "f" for i in layers]
    else:
        freq = config.get("index_topk_freq") or 1
        offset = config.get("index_skip_topk_offset", 2)
        full = [max(i - offset + 1, 0) % freq == 0 for i in layers]
    if not full[0]:
        raise ValueError("layer 0 has no earlier selection to share")
    return full


def has_experts(config, layer):
    routed = config["n_routed_experts"] is not None
    late = layer >= config["first_k_dense_replace"]
    return routed and late and layer % config["moe_layer_freq"] == 0


def index_scores(w, config, x, qr):
    """(L, T): the lightning indexer's score of each query (row) for each key."""
    L, heads, D = len(x), config["index_n_heads"], config["index_head_dim"]
    interleaved = config.get("indexer_rope_interleave")
    if interleaved is None:
        interleaved = config["model_type"] == "glm_moe_dsa"
    key = linear(w, "wk", x)
    key = key - key.mean(axis=-1, keepdims=True)
    key = key / np.sqrt((key**2).mean(axis=-1, keepdims=True) + INNER_EPS)
    key = rope(key * w["k_norm.weight"] + w["k_norm.bias"], config, interleaved)
    queries = linear(w, "wq_b", qr).reshape(L, heads, D)
    head_weights = linear(w, "weights_proj", x)
    scores = np.zeros((L, L))
    for h in range(heads):
        query = rope(queries[:, h], config, interleaved)
        scores += np.maximum(query @ key.T, 0) * head_weights[:, h, None]
    return scores * heads**-0.5 * D**-0.5


def select(scores, index_topk, sinks=0, recency=0):
    """(L, T) scores -> bool (L, T), visible columns only; None where all T fit."""
    if sinks >= index_topk:
        raise ValueError(f"{sinks} sinks leave nothing of {index_topk} columns")
    L, T = scores.shape
    if index_topk >= T:
        return None
    recency = min(recency, index_topk - sinks)
    columns = np.zeros((L, T), bool)
    for i in range(L):
        forced = [c for c in range(i + 1) if c < sinks or c > i - recency]
        rest = [c for c in range(i + 1) if c not in forced]
        rest.sort(key=lambda c: scores[i, c], reverse=True)
        columns[i, (forced + rest)[:index_topk]] = True
    return columns


def compressed_queries(w, x):
    """(L, q_lora_rank): what the queries of attention and indexer are made of."""
    return rms_norm(linear(w, "q_a_proj", x), w["q_a_layernorm.weight"], INNER_EPS)


def compressed_keys(w, config, x):
    """(L, kv_lora_rank) latent, and (L, qk_rope_head_dim) rotated: of all heads."""
    rank, compressed = config["kv_lora_rank"], linear(w, "kv_a_proj_with_mqa", x)
    latent = rms_norm(compressed[:, :rank], w["kv_a_layernorm.weight"], INNER_EPS)
    return latent, rope(compressed[:, rank:], config, interleaved=True)


def attention_weights(w, config, x, qr, columns):
    """(H, L, T): softmax over `columns`, or over all visible ones."""
    L, heads = len(x), config["num_attention_heads"]
    nope, rotated = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    queries = linear(w, "q_b_proj", qr).reshape(L, heads, nope + rotated)
    latent, key_rope = compressed_keys(w, config, x)
    seen = np.tri(L, dtype=bool) if columns is None else columns
    weights = []
    for h in range(heads):
        key = latent @ w["embed_q.weight"][h]
        query_rope = rope(queries[:, h, nope:], config, interleaved=True)
        scores = queries[:, h, :nope] @ key.T + query_rope @ key_rope.T
        scores = np.where(seen, scores * (nope + rotated) ** -0.5, -np.inf)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights.append(shares / shares.sum(axis=-1, keepdims=True))
    return np.stack(weights)


def attention(w, config, x, qr, columns):
    """(L, hidden_size): latent attention over `columns`, or all visible ones."""
    latent, _ = compressed_keys(w, config, x)
    weights = attention_weights(w, config, x, qr, columns)
    values = [latent @ up.T for up in w["unembed_out.weight"]]
    return linear(w, "o_proj", np.concatenate(weights @ np.stack(values), axis=-1))


def feed_forward(w, config, x):
    gate = linear(w, "gate_proj", x)
    return linear(w, "down_proj", gate * sigmoid(gate) * linear(w, "up_proj", x))


def experts(w, config, x):
    """(L, hidden_size): the best experts of each token, and the shared ones."""
    output = np.zeros_like(x)
    if config["n_shared_experts"] is not None:
        output += feed_forward(under(w, "shared_experts."), config, x)
    routed = under(w, "switch_mlp.")
    affinities = sigmoid(linear(w, "gate", x))
    for i, affinity in enumerate(affinities):
        chosen = route(affinity, w["gate.e_score_correction_bias"], config)
        shares = affinity[chosen]
        if config["norm_topk_prob"] and len(chosen) > 1:
            shares = shares / shares.sum()
        for share, e in zip(shares * config["routed_scaling_factor"], chosen):
            expert = {name: stack[e] for name, stack in routed.items()}
            output[i] += share * feed_forward(expert, config, x[i])
    return output


def route(affinity, bias, config):
    """Experts of one token. The bias takes part in the choice, not in the shares."""
    ranks = affinity + bias
    if config["n_group"] > 1:
        groups = ranks.reshape(config["n_group"], -1)
        best_pairs = np.sort(groups, axis=-1)[:, -2:].sum(axis=-1)
        dropped = np.argsort(-best_pairs)[config["topk_group"] :]
        groups[dropped] = -np.inf
        ranks = groups.reshape(-1)
    return np.argsort(-ranks)[: config["num_experts_per_tok"]]


def rope(x, config, interleaved):
    """Turns the first qk_rope_head_dim of (L, D), row i by position i.

    Pairs are (0, 1), (2, 3)… where interleaved, else (0, half), (1, half + 1)…
    """
    facts = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if facts.get("rope_type", facts.get("type", "default")) != "default":
        raise NotImplementedError(f"RoPE {facts}")
    glm = config["model_type"] == "glm_moe_dsa"
    theta = facts["rope_theta"] if glm else config["rope_theta"]
    dims = config["qk_rope_head_dim"]
    pair = np.arange(dims // 2)
    first, second = (
        (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + dims // 2)
    )
    angle = np.arange(len(x))[:, None] * float(theta) ** (-2 * pair / dims)
    turned = x.copy()
    turned[:, first] = x[:, first] * np.cos(angle) - x[:, second] * np.sin(angle)
    turned[:, second] = x[:, first] * np.sin(angle) + x[:, second] * np.cos(angle)
    return turned


def rms_norm(x, weight, eps):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def linear(w, name, x):
    return x @ w[f"{name}.weight"].T.astype(np.float64) + w.get(f"{name}.bias", 0.0)


def under(weights, prefix):
    """The weights below `prefix`, by the rest of their names."""
    return {n[len(prefix) :]: v for n, v in weights.items() if n.startswith(prefix)}
