#!/usr/bin/env python3
"""The reference: ling's model and training step in PyTorch, float64, written from the formulas of its design.

    reference.py --check                 test this file itself (random numbers, AdamW, gradients, conditioning)
    reference.py --out tests/fixtures    make every golden fixture again; the same numbers each time

Nobody needs PyTorch to build, run or test ling: the fixtures are kept in the repository, and this file only
makes them. PyTorch comes from Debian 13, in a folder of its own where the system is an older one:

    debootstrap trixie /tmp/trixie && mount --bind /proc /tmp/trixie/proc
    chroot /tmp/trixie apt-get install -y --no-install-recommends python3-torch python3-numpy

A fixture tests/fixtures/CASE/ holds
    case.yaml              the config, as ling reads it
    weights.safetensors    the weights at the start, Hugging Face names
    expected.safetensors   input.S, target.S        [batch * seq_len] tokens of step S = 1..5, int32; target -1: ignored
                           logits                   [batch * seq_len, V] of step 1's training forward pass
                           grad.NAME                step 1's gradients, before the clip
                           loss, balance_loss, z_loss, grad_norm, lr   [5] each step's numbers, float64;
                                                    balance and z are means over the layers with experts
                           after.NAME               the weights after step 5
                           router_mean, router_std  [layers] after step 5, where there is a routing warmup;
                                                    0 and 1 for a dense layer
One of Ling 2.0, tests/fixtures/v2_*, holds float64 throughout, in after.NAME the experts' biases alone (base: all), and
                           router_logits.L          [batch * seq_len, E] of layer L in step 1's training forward pass
                           router_weights.L         [batch * seq_len, E] of the chosen experts, 0 for all others
                           mtp_loss                 [5] each step's mean over the depths of multi-token prediction, 0
                                                    without one; the layer of depth i is num_hidden_layers + i
All inputs are consecutive windows of one stream of tokens, so where no target is -1 a token file gives them too.
"""
import argparse
import copy
import json
import math
import os
import struct

import numpy as np
import torch
import torch.nn.functional as F

STEPS = 5
ROUTING_NOISE = 3 << 16         # Philox purpose: this + layer
FIXTURE_NOISE = 100 << 16       # purpose of the numbers that only fixtures need: weights and tokens

# ----------------------------------------------------------------------------------------------------------------
# The cases: what differs from BASE, by section; `fixture` is not part of the config.
#   fixture.ignore               share of the targets that is ignored (-1)
#   fixture.ignore_micro_batch   step S ignores every target of micro-batch S % 2
# ----------------------------------------------------------------------------------------------------------------

# What the class of Ling 2.0 adds to the model's keys, with the values that mean the first class, which lacks them.
V2_KEYS = {
    "architecture": "BailingMoeForCausalLM", "score_function": "softmax", "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 1.0, "moe_router_enable_expert_bias": False, "use_qk_norm": False,
    "partial_rotary_factor": 1.0, "num_nextn_predict_layers": 0, "mtp_loss_scaling_factor": 0.0,
}

BASE = {
    "model": {
        **V2_KEYS,
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
        "vocab_size": 33, "num_experts": 6, "num_experts_per_tok": 2, "num_shared_experts": 2,
        "moe_intermediate_size": 6, "intermediate_size": 20, "first_k_dense_replace": 0,
        "norm_head": True, "norm_topk_prob": True, "tie_word_embeddings": False, "use_bias": False,
        "use_qkv_bias": False, "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
        "router": {"balance_loss_coef": 0.015, "balance_loss_scope": "micro_batch", "z_loss_coef": 1e-4,
                   "warmup_steps": 0, "bias_update_rate": 0.0},
    },
    "data": {"train": "unused", "tokenizer": "none", "seq_len": 8, "shuffle": False},
    "train": {"output_dir": "unused", "seed": 1, "steps": STEPS, "micro_batch": 2, "batch": 4, "grad_clip": 1.0},
    # eps 1e-5, not 1e-8: an element whose gradient is nearly 0 would turn float32's rounding into a step of full size.
    "optimizer": {"beta1": 0.9, "beta2": 0.95, "eps": 1e-5, "weight_decay": 0.1},
    "schedule": {"peak_lr": 1e-2, "warmup_steps": 2, "drops": [{"at": 0.6, "factor": 0.5}],
                 "decay": {"steps": 2, "shape": "1-sqrt", "final_lr": 1e-4}},
    "fixture": {"ignore": 0.0, "ignore_micro_batch": False},
}

CASES = {
    "base": {},
    "no_norm_head": {
        "model": {"norm_head": False, "rope_theta": 600000.0},
        "schedule": {"warmup_steps": 0, "drops": [], "decay": {"steps": 3, "shape": "linear"}}},
    "tied_norm_head": {
        "model": {"tie_word_embeddings": True, "num_shared_experts": 1},
        "schedule": {"decay": {"steps": 5, "shape": "cosine"}},
        "fixture": {"ignore": 0.2}},
    "tied_plain": {
        "model": {"tie_word_embeddings": True, "norm_head": False, "num_shared_experts": 1,
                  "router": {"z_loss_coef": 0.0}},
        "train": {"micro_batch": 4, "seed": 2, "grad_clip": 0.0},
        "schedule": {"warmup_steps": 0, "drops": [], "decay": {"steps": 0}}},
    "shared0": {
        "model": {"num_shared_experts": 0, "vocab_size": 50},
        "train": {"micro_batch": 1},
        "schedule": {"warmup_steps": 3, "decay": {"steps": 3, "shape": "inverse_sqrt", "final_lr": 1e-3}}},
    "head_dim": {
        "model": {"head_dim": 6, "num_shared_experts": 1, "rms_norm_eps": 1e-6, "rope_theta": 100.0},
        "schedule": {"drops": [{"at": 0.2, "factor": 0.5}, {"at": 0.4, "factor": 0.25}], "decay": {"steps": 0}}},
    "dense_first": {
        "model": {"first_k_dense_replace": 1},
        "schedule": {"warmup_steps": 0, "decay": {"steps": 8, "shape": "linear"}},
        "fixture": {"ignore": 0.3}},
    "scope_sequence": {
        "model": {"router": {"balance_loss_scope": "sequence", "balance_loss_coef": 0.5, "z_loss_coef": 0.01}},
        "train": {"micro_batch": 3},
        "schedule": {"warmup_steps": 4, "decay": {"steps": 8, "shape": "inverse_sqrt", "final_lr": 5e-3}},
        "fixture": {"ignore": 0.2, "ignore_micro_batch": True}},
    "biases": {
        "model": {"use_bias": True, "use_qkv_bias": True},
        "train": {"grad_clip": 100.0},
        "optimizer": {"weight_decay": 0.0},
        "schedule": {"decay": {"steps": 3, "shape": "cosine", "final_lr": 0.0}}},
    "routing_warmup": {
        "model": {"num_hidden_layers": 3, "first_k_dense_replace": 1, "num_shared_experts": 1,
                  "router": {"warmup_steps": 3, "balance_loss_coef": 0.1, "z_loss_coef": 0.01}},
        "train": {"seed": 0x123456789A},
        "schedule": {"warmup_steps": 8, "drops": [{"at": 0.2, "factor": 0.9}],
                     "decay": {"steps": 1, "shape": "linear"}}},
    "k1_no_renorm": {
        "model": {"num_experts_per_tok": 1, "num_experts": 4, "moe_intermediate_size": 10},
        "train": {"seed": 2},
        "optimizer": {"beta1": 0.8, "beta2": 0.99, "eps": 1e-4},
        "schedule": {"decay": {"steps": 1, "shape": "1-sqrt"}}},
    "no_topk_norm": {
        "model": {"norm_topk_prob": False, "router": {"balance_loss_coef": 0.0}},
        "schedule": {"decay": {"steps": 8, "shape": "1-sqrt"}}},
    "odd_sizes": {
        "model": {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "num_key_value_heads": 1,
                  "head_dim": 8, "vocab_size": 37, "num_experts": 7, "num_experts_per_tok": 3,
                  "num_shared_experts": 1, "moe_intermediate_size": 10, "rms_norm_eps": 1e-2,
                  "router": {"balance_loss_coef": 0.2, "z_loss_coef": 0.05}},
        "data": {"seq_len": 9},
        "train": {"micro_batch": 3, "batch": 5, "grad_clip": 0.25},
        "schedule": {"warmup_steps": 1, "decay": {"steps": 8, "shape": "cosine"}},
        "fixture": {"ignore": 0.1}},
}

BASE_V2 = {
    "model": {
        "architecture": "BailingMoeV2ForCausalLM", "score_function": "sigmoid", "n_group": 2, "topk_group": 1,
        "routed_scaling_factor": 2.5, "moe_router_enable_expert_bias": True, "use_qk_norm": True,
        "partial_rotary_factor": 0.5, "num_nextn_predict_layers": 1, "mtp_loss_scaling_factor": 0.3,
        "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 21,
        "num_experts": 6, "num_shared_experts": 1, "moe_intermediate_size": 4, "intermediate_size": 6,
        "first_k_dense_replace": 1, "norm_head": False, "rms_norm_eps": 1e-6,
        # far more than the 0 and 3.5e-6 of Ling 2.0's pre-training, so that a test sees them
        "router": {"balance_loss_coef": 0.0, "z_loss_coef": 1e-2, "bias_update_rate": 1e-3},
    },
    "train": {"batch": 2},
}

CASES_V2 = {
    "v2_base": {},
    "v2_plain": {  # none of what is new but the sigmoid, the bias and the scale
        "model": {"num_hidden_layers": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0,
                  "mtp_loss_scaling_factor": 0.0, "n_group": 1, "num_experts": 5, "num_shared_experts": 0,
                  "use_qk_norm": False, "partial_rotary_factor": 1.0, "head_dim": 4,
                  "router": {"balance_loss_coef": 0.3, "bias_update_rate": 0.05}},
        "fixture": {"ignore": 0.2}},
    "v2_groups": {
        "model": {"num_hidden_layers": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0,
                  "mtp_loss_scaling_factor": 0.0, "n_group": 3, "topk_group": 2, "num_experts": 12,
                  "num_experts_per_tok": 3, "num_shared_experts": 2, "moe_intermediate_size": 3,
                  "use_bias": True, "use_qkv_bias": True, "partial_rotary_factor": 0.75,
                  "router": {"bias_update_rate": 0.1}},
        "train": {"batch": 3},
        "fixture": {"ignore": 0.2}},
    "v2_mtp2": {
        "model": {"num_hidden_layers": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": 2, "num_experts": 4,
                  "n_group": 1, "tie_word_embeddings": True,
                  "router": {"balance_loss_coef": 0.1, "balance_loss_scope": "sequence"}},
        "data": {"seq_len": 7},
        "train": {"batch": 3},
        "fixture": {"ignore": 0.3, "ignore_micro_batch": True}},
    "v2_mtp_of_dense": {  # the only experts are those of the MTP layer; one expert a token
        "model": {"num_hidden_layers": 1, "num_experts": 4, "n_group": 1, "num_experts_per_tok": 1,
                  "num_shared_experts": 2, "mtp_loss_scaling_factor": 1.0},
        "train": {"micro_batch": 1}},
    "v2_no_topk_norm": {  # and all groups are chosen, no expert bias
        "model": {"num_hidden_layers": 2, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0, "num_experts": 4,
                  "mtp_loss_scaling_factor": 0.0, "topk_group": 2, "norm_topk_prob": False,
                  "moe_router_enable_expert_bias": False, "partial_rotary_factor": 0.25, "rope_theta": 100.0},
        "train": {"seed": 3}},
    "v2_k1": {
        "model": {"num_hidden_layers": 1, "first_k_dense_replace": 0, "num_experts": 4, "num_experts_per_tok": 1,
                  "router": {"bias_update_rate": 0.02}},
        "train": {"batch": 3, "micro_batch": 1, "seed": 3},
        "fixture": {"ignore": 0.1}},
    "v2_routing_warmup": {
        "model": {"num_hidden_layers": 1, "first_k_dense_replace": 0, "num_shared_experts": 0,
                  "router": {"warmup_steps": 3, "balance_loss_coef": 0.1}},
        "train": {"batch": 3, "seed": 3}},
}


def all_cases():
    """Name -> config of every fixture with a config in YAML."""
    base_v2 = merged(BASE, BASE_V2)
    return {**{name: merged(BASE, changes) for name, changes in CASES.items()},
            **{name: merged(base_v2, changes) for name, changes in CASES_V2.items()}}


def is_v2(m):
    return m["architecture"] == "BailingMoeV2ForCausalLM"


def merged(base, changes):
    """A deep copy of the nested dictionary `base` with `changes` laid over it; every key must be there already."""
    out = copy.deepcopy(base)
    for key, value in changes.items():
        out[key] = merged(base[key], value) if isinstance(base[key], dict) else value
    return out


# ----------------------------------------------------------------------------------------------------------------
# Random numbers: Philox4x32-10, so that a number depends on (seed, purpose, step, position) and nothing else
# ----------------------------------------------------------------------------------------------------------------

def philox(counter, key):
    """counter [n, 4], key [2], both 32-bit words -> [n, 4] random 32-bit words."""
    mask, low = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3 = np.asarray(counter, np.uint64).T
    k0, k1 = int(key[0]), int(key[1])
    for _ in range(10):
        left, right = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (right >> low) ^ c1 ^ np.uint64(k0), right & mask
        c2, c3 = (left >> low) ^ c3 ^ np.uint64(k1), left & mask
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], 1)


def random_words(seed, purpose, step, n):
    """The words at positions 0..n-1: position p is lane p % 4 of block p / 4."""
    block = np.arange((n + 3) // 4, dtype=np.uint64)
    counter = np.empty((len(block), 4), np.uint64)
    counter[:, 0], counter[:, 1] = block & np.uint64(0xFFFFFFFF), block >> np.uint64(32)
    counter[:, 2], counter[:, 3] = step, purpose
    return philox(counter, (seed & 0xFFFFFFFF, seed >> 32)).reshape(-1)[:n]


def random_normal(seed, purpose, step, n):
    """Standard normals at positions 0..n-1: Box-Muller on each half of a block."""
    words = random_words(seed, purpose, step, (n + 3) // 4 * 4).astype(np.float64).reshape(-1, 2)
    radius = np.sqrt(-2 * np.log((words[:, 0] + 1) / 2**32))
    angle = 2 * np.pi * (words[:, 1] / 2**32)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).reshape(-1)[:n]


# ----------------------------------------------------------------------------------------------------------------
# The model. w: name -> tensor, a weight is [out, in]. Tokens are [B, L], activations [B, L, H].
# ----------------------------------------------------------------------------------------------------------------

def is_dense(m, layer):
    """Whether a layer has no experts. An MTP layer, whose index is num_hidden_layers or more, always has them."""
    return layer < min(m["first_k_dense_replace"], m["num_hidden_layers"])


def is_buffer(name):
    """Whether a tensor has no gradient: the expert bias, which update_bias() changes."""
    return name.endswith(".expert_bias")


def weight_shapes(m):
    """Hugging Face name -> shape of each weight, in the order of the forward pass."""
    H, V, d = m["hidden_size"], m["vocab_size"], m["head_dim"]
    nh, nkv = m["num_attention_heads"], m["num_key_value_heads"]
    shapes = {"model.word_embeddings.weight": (V, H)}

    def swiglu_shapes(prefix, width):
        shapes.update({prefix + "gate_proj.weight": (width, H), prefix + "up_proj.weight": (width, H),
                       prefix + "down_proj.weight": (H, width)})

    for layer in range(m["num_hidden_layers"] + m["num_nextn_predict_layers"]):
        prefix = f"model.layers.{layer}."
        if layer >= m["num_hidden_layers"]:
            shapes.update({prefix + name + ".weight": (H,) for name in ("enorm", "hnorm", "final_layernorm")})
            shapes[prefix + "eh_proj.weight"] = (H, 2 * H)
        shapes[prefix + "input_layernorm.weight"] = (H,)
        shapes[prefix + "attention.query_key_value.weight"] = ((nh + 2 * nkv) * d, H)
        if m["use_qkv_bias"]:
            shapes[prefix + "attention.query_key_value.bias"] = ((nh + 2 * nkv) * d,)
        if m["use_qk_norm"]:
            shapes[prefix + "attention.query_layernorm.weight"] = (d,)
            shapes[prefix + "attention.key_layernorm.weight"] = (d,)
        shapes[prefix + "attention.dense.weight"] = (H, nh * d)
        if m["use_bias"]:
            shapes[prefix + "attention.dense.bias"] = (H,)
        shapes[prefix + "post_attention_layernorm.weight"] = (H,)
        if is_dense(m, layer):
            swiglu_shapes(prefix + "mlp.", m["intermediate_size"])
            continue
        shapes[prefix + "mlp.gate.weight"] = (m["num_experts"], H)
        if is_v2(m):  # also where it has no effect
            shapes[prefix + "mlp.gate.expert_bias"] = (m["num_experts"],)
        for expert in range(m["num_experts"]):
            swiglu_shapes(f"{prefix}mlp.experts.{expert}.", m["moe_intermediate_size"])
        if m["num_shared_experts"]:
            swiglu_shapes(prefix + "mlp.shared_experts.", m["num_shared_experts"] * m["moe_intermediate_size"])
    shapes["model.norm.weight"] = (H,)
    if not m["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (V, H)
    return shapes


def record(name, x):
    """Called with the output of each operation, returns it. scripts/dump-torch.py has another function here."""
    return x


def rms_norm(x, weight, eps):
    return weight * x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)


def swiglu(x, w, prefix):
    gate, up, down = (w[f"{prefix}{part}_proj.weight"] for part in ("gate", "up", "down"))
    gate_up = record(prefix + "gate_up", torch.cat([x @ gate.T, x @ up.T], -1))
    return (F.silu(gate_up[..., :len(gate)]) * gate_up[..., len(gate):]) @ down.T


def rope(x, theta, factor=1.0):
    """Rotates the pairs (i, i + r/2) of the first r = int(d factor) elements of each head of x [B, heads, L, d] by
    position * theta^(-2i/r). The others stay as they are."""
    L, d = x.shape[-2:]
    r = int(d * factor)
    frequency = theta ** (-2 * torch.arange(r // 2, dtype=torch.float64) / r)
    angle = torch.arange(L, dtype=torch.float64)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second, rest = x.split([r // 2, r // 2, d - r], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def attention(x, w, prefix, m):
    B, L, _ = x.shape
    nh, nkv, d = m["num_attention_heads"], m["num_key_value_heads"], m["head_dim"]
    qkv = x @ w[prefix + "query_key_value.weight"].T
    if m["use_qkv_bias"]:
        qkv = qkv + w[prefix + "query_key_value.bias"]
    qkv = record(prefix + "qkv", qkv)
    q, k, v = qkv.view(B, L, nh + 2 * nkv, d).transpose(1, 2).split([nh, nkv, nkv], 1)
    if m["use_qk_norm"]:
        q = rms_norm(q, w[prefix + "query_layernorm.weight"], m["rms_norm_eps"])
        k = rms_norm(k, w[prefix + "key_layernorm.weight"], m["rms_norm_eps"])
        q, k, v = record(prefix + "qk norm", torch.cat([q, k, v], 1)).split([nh, nkv, nkv], 1)
    q, k = (rope(x, m["rope_theta"], m["partial_rotary_factor"]) for x in (q, k))
    q, k, v = record(prefix + "rope", torch.cat([q, k, v], 1)).split([nh, nkv, nkv], 1)
    k, v = k.repeat_interleave(nh // nkv, 1), v.repeat_interleave(nh // nkv, 1)
    scores = q @ k.transpose(2, 3) / math.sqrt(d)
    future = torch.ones(L, L, dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ v
    mixed = record(prefix + "core", mixed.transpose(1, 2).reshape(B, L, nh * d))
    out = mixed @ w[prefix + "dense.weight"].T
    return out + w[prefix + "dense.bias"] if m["use_bias"] else out


def choose(score, m):
    """Scores [..., E] that are ranked -> the chosen experts [..., k], best first, and the smallest distance between the
    last winner and the first loser, of experts and of groups. Ties go to the lower index."""
    E, k, n, kept, margin = score.shape[-1], m["num_experts_per_tok"], m["n_group"], m["topk_group"], math.inf
    if n > 1:  # consecutive experts; a group's score is the sum of its two best
        grouped = score.unflatten(-1, (n, E // n))
        ranked, order = grouped.topk(2).values.sum(-1).sort(dim=-1, descending=True, stable=True)
        keep = torch.zeros_like(ranked, dtype=torch.bool).scatter(-1, order[..., :kept], True)
        score = grouped.masked_fill(~keep[..., None], -math.inf).flatten(-2)
        if kept < n:
            margin = float((ranked[..., kept - 1] - ranked[..., kept]).min())
    ranked, order = score.sort(dim=-1, descending=True, stable=True)
    return order[..., :k], min(margin, float((ranked[..., k - 1] - ranked[..., k]).min()))


def moe(x, w, prefix, m, noise):
    """x [B, L, H] -> the layer's output, and its routing: router logits s [B, L, E], who was chosen [B, L, E] with
    which weight [B, L, E], and the smallest distance that decided. noise is None, or (a, mu + sigma * eps)."""
    k, v2 = m["num_experts_per_tok"], is_v2(m)
    s = record(prefix + "logits", x @ w[prefix + "gate.weight"].T)
    score = s if noise is None else noise[0] * s + (1 - noise[0]) * noise[1]
    p = record(prefix + "softmax", score.sigmoid() if v2 else score.softmax(-1))
    ranked = p.detach()
    if m["moe_router_enable_expert_bias"]:  # for the choice alone
        ranked = ranked + w[prefix + "gate.expert_bias"]
    order, margin = choose(ranked if v2 else ranked.log(), m)  # of softmax, the relative distance
    chosen = torch.zeros_like(p, dtype=torch.bool).scatter(-1, order, True)
    weight = p * chosen
    if m["norm_topk_prob"] and k > 1:
        weight = weight / (weight.sum(-1, keepdim=True) + (1e-20 if v2 else 0))
    weight = weight * m["routed_scaling_factor"]
    record(prefix + "top-k", order)
    weight = record(prefix + "weights", weight)
    y = sum(record(f"{prefix}experts.{e}.down", weight[..., e, None] * swiglu(x, w, f"{prefix}experts.{e}."))
            for e in range(m["num_experts"]))
    if m["num_shared_experts"]:
        y = y + swiglu(x, w, prefix + "shared_experts.")
    return y, {"logits": s, "chosen": chosen, "weight": weight, "margin": margin}


def head_weight(w, m):
    return w["model.word_embeddings.weight" if m["tie_word_embeddings"] else "lm_head.weight"]


def head_divisor(w, m):
    """What the head's columns are divided by [H]: a constant in the backward pass, computed once a step."""
    head = head_weight(w, m).detach()
    return (head * head).sum(0).sqrt() + 1e-7 if m["norm_head"] else torch.ones_like(head[0])


def decoder_layer(x, w, layer, m, routings, noise):
    """One layer on the residual stream x [B, L, H]. A layer with experts puts its routing into `routings`."""
    prefix, eps = f"model.layers.{layer}.", m["rms_norm_eps"]
    normed = record(prefix + "attention.norm", rms_norm(x, w[prefix + "input_layernorm.weight"], eps))
    x = record(prefix + "attention.output", x + attention(normed, w, prefix + "attention.", m))
    normed = record(prefix + "ffn.norm", rms_norm(x, w[prefix + "post_attention_layernorm.weight"], eps))
    if is_dense(m, layer):
        y = swiglu(normed, w, prefix + "mlp.")
    else:
        y, routings[layer] = moe(normed, w, prefix + "mlp.", m, noise and noise[layer])
    return record(prefix + "output", x + y)


def shifted(tokens, n, fill):
    """Each row of tokens [B, L] n places to the left; the places that are freed at its end hold `fill`."""
    n = min(n, tokens.shape[1])
    return F.pad(tokens[:, n:], (0, n), value=fill)


def forward(tokens, w, m, divisor, noise=None):
    """tokens [B, L] -> logits [B, L, V]; those of each multi-token prediction layer, a list; and the routing of each
    layer by its index (dense layers have none). noise: None, or layer -> (a, noise [B, L, E]), see moe()."""
    embedding, eps = w["model.word_embeddings.weight"], m["rms_norm_eps"]
    x, routings, deeper = record("embedding", embedding[tokens]), {}, []
    for layer in range(m["num_hidden_layers"]):
        x = decoder_layer(x, w, layer, m, routings, noise)
    x = record("norm", rms_norm(x, w["model.norm.weight"], eps))
    head = (head_weight(w, m) / divisor).T
    logits = record("head.logits", x @ head)
    for i in range(m["num_nextn_predict_layers"]):
        layer = m["num_hidden_layers"] + i
        prefix = f"model.layers.{layer}."
        e = record(prefix + "embedding", embedding[shifted(tokens, i + 1, 0)])
        e = record(prefix + "mtp.enorm", rms_norm(e, w[prefix + "enorm.weight"], eps))
        h = record(prefix + "mtp.hnorm", rms_norm(x, w[prefix + "hnorm.weight"], eps))
        x = record(prefix + "mtp.eh_proj", torch.cat([e, h], -1) @ w[prefix + "eh_proj.weight"].T)
        x = decoder_layer(x, w, layer, m, routings, noise)
        x = record(prefix + "norm", rms_norm(x, w[prefix + "final_layernorm.weight"], eps))
        deeper.append(record(prefix + "head.logits", x @ head))
    return logits, deeper, routings


# ----------------------------------------------------------------------------------------------------------------
# Losses
# ----------------------------------------------------------------------------------------------------------------

def balance_loss(s, chosen, m):
    """Router logits and choices of N tokens, [N, E]: E * sum_e f_e P_e. f carries no gradient. P is the mean of the
    softmax or, as in Megatron, of the sigmoids, each over the sum of its token's."""
    f = chosen.to(s.dtype).mean(0) / m["num_experts_per_tok"]
    p = s.sigmoid() if is_v2(m) else s.softmax(-1)
    if is_v2(m):
        p = p / p.sum(-1, keepdim=True)
    return s.shape[1] * (f * p.mean(0)).sum()


def num_routers(m):
    return sum(not is_dense(m, layer) for layer in range(m["num_hidden_layers"] + m["num_nextn_predict_layers"]))


def num_counted(targets):
    return max(int((targets >= 0).sum()), 1)


def step_losses(tokens, targets, w, c, divisor, noise=None):
    """One global batch, tokens and targets [batch, L], in micro-batches. Returns a dictionary: cross-entropy; mtp, that
    of each MTP layer, balance and z, all summed over layers; their weighted total, which is differentiated; logits;
    by layer the router's logits, choices and weights; the smallest routing margin.

    Depth i of MTP has the targets of i + 1 places further on, row by row; none at the end of a row. Its mean is over
    its own targets of the whole batch that count."""
    m, batch = c["model"], len(tokens)
    per_sequence = m["router"]["balance_loss_scope"] == "sequence"
    cross_entropy, mtp, balance, z = (torch.zeros((), dtype=divisor.dtype) for _ in range(4))
    deeper_targets = [shifted(targets, i + 1, -1) for i in range(m["num_nextn_predict_layers"])]
    logits, kept, margin = [], {"logits": {}, "chosen": {}, "weight": {}}, math.inf
    for first in range(0, batch, c["train"]["micro_batch"]):
        part = slice(first, first + c["train"]["micro_batch"])
        part_noise = noise and {layer: (a, n[part]) for layer, (a, n) in noise.items()}
        out, deeper, routings = forward(tokens[part], w, m, divisor, part_noise)
        out, target = out.flatten(0, 1), targets[part].flatten()
        logits.append(out.detach())
        cross_entropy = cross_entropy + F.cross_entropy(out, target, ignore_index=-1, reduction="sum")
        for out, far in zip(deeper, deeper_targets):
            far_sum = F.cross_entropy(out.flatten(0, 1), far[part].flatten(), ignore_index=-1, reduction="sum")
            mtp = mtp + far_sum / num_counted(far)
        for layer, r in routings.items():
            s, chosen = r["logits"], r["chosen"]
            scopes = zip(s, chosen) if per_sequence else [(s.flatten(0, 1), chosen.flatten(0, 1))]
            share = 1 / batch if per_sequence else len(s) / batch  # of the step's tokens
            balance = balance + share * sum(balance_loss(*scope, m) for scope in scopes)
            z = z + len(s) / batch * s.logsumexp(-1).square().mean()
            for what, by_layer in kept.items():
                by_layer.setdefault(layer, []).append(r[what].detach())
            margin = min(margin, r["margin"])
    cross_entropy = cross_entropy / num_counted(targets)
    total = (cross_entropy + m["mtp_loss_scaling_factor"] * mtp + m["router"]["balance_loss_coef"] * balance
             + m["router"]["z_loss_coef"] * z)
    routers = {f"router_{what}": {layer: torch.cat(s) for layer, s in by_layer.items()}
               for what, by_layer in kept.items()}
    return {"cross_entropy": cross_entropy, "mtp": mtp, "balance": balance, "z": z, "total": total,
            "logits": torch.cat(logits), **routers, "margin": margin}


def gradients(loss, w):
    """Name -> gradient of the loss, of every tensor of w; zeros of a buffer."""
    names = [name for name, p in w.items() if p.requires_grad]
    found = dict(zip(names, torch.autograd.grad(loss, [w[name] for name in names])))
    return {name: found.get(name, torch.zeros_like(p)) for name, p in w.items()}


# ----------------------------------------------------------------------------------------------------------------
# The training step. Steps count from 1.
# ----------------------------------------------------------------------------------------------------------------

def learning_rate(c, step):
    schedule, steps = c["schedule"], c["train"]["steps"]
    step_tokens = c["train"]["batch"] * c["data"]["seq_len"]
    done = (step - 1) * step_tokens / (steps * step_tokens)
    lr = schedule["peak_lr"] * math.prod(drop["factor"] for drop in schedule["drops"] if done >= drop["at"])
    decay, final = schedule["decay"]["steps"], schedule["decay"]["final_lr"]
    if decay > 0 and step > steps - decay:
        p = (step - (steps - decay)) / decay
        lr = {
            "linear": lambda: final + (lr - final) * (1 - p),
            "cosine": lambda: final + (lr - final) * (1 + math.cos(math.pi * p)) / 2,
            "1-sqrt": lambda: final + (lr - final) * (1 - math.sqrt(p)),
            "inverse_sqrt": lambda: ((1 - p) / lr**2 + p / final**2) ** -0.5,
        }[schedule["decay"]["shape"]]()
    return lr * min(1, step / schedule["warmup_steps"]) if schedule["warmup_steps"] else lr


def adamw(w, grads, state, step, lr, o):
    """Updates the tensors of w in place; state: name -> [exp_avg, exp_avg_sq], filled on first use."""
    for name, p in w.items():
        if is_buffer(name):
            continue
        g = grads[name]
        mean, square = state.setdefault(name, [torch.zeros_like(p), torch.zeros_like(p)])
        mean.mul_(o["beta1"]).add_((1 - o["beta1"]) * g)
        square.mul_(o["beta2"]).add_((1 - o["beta2"]) * g * g)
        mean_hat, square_hat = mean / (1 - o["beta1"] ** step), square / (1 - o["beta2"] ** step)
        if p.ndim == 2:  # matrices and embeddings; no decay on norms and biases
            p.mul_(1 - lr * o["weight_decay"])
        p.sub_(lr * mean_hat / (square_hat.sqrt() + o["eps"]))


def update_bias(w, chosen, m):
    """The expert bias after a step, in place, from the choices [batch, L, E] of the whole batch by layer: a step up for
    experts with fewer tokens than the mean, down for those with more, none for the others, less the mean of the steps,
    so that the biases' sum stays."""
    for layer, x in chosen.items():
        load = x.flatten(0, -2).sum(0).double()
        direction = (load.mean() - load).sign()
        bias = w[f"model.layers.{layer}.mlp.gate.expert_bias"]
        bias.add_(m["router"]["bias_update_rate"] * (direction - direction.mean()).to(bias.dtype))


def routing_noise(c, step, mean, std, dtype):
    """The noise of one step's routing warmup for forward(), or None when the warmup is over."""
    m, batch, L = c["model"], c["train"]["batch"], c["data"]["seq_len"]
    i, warmup, E = step - 1, m["router"]["warmup_steps"], m["num_experts"]
    if i >= warmup:
        return None
    noise = {}
    for layer in range(m["first_k_dense_replace"], m["num_hidden_layers"] + m["num_nextn_predict_layers"]):
        eps = torch.from_numpy(random_normal(c["train"]["seed"], ROUTING_NOISE + layer, i, batch * L * E))
        noise[layer] = (i / warmup, (mean[layer] + std[layer] * eps).to(dtype).view(batch, L, E))
    return noise


def on_tape(weights, dtype=torch.float64):
    """A copy of the weights that autograd follows."""
    return {name: p.to(dtype, copy=True).requires_grad_(not is_buffer(name)) for name, p in weights.items()}


def train(c, weights, batches, dtype=torch.float64):
    """Trains on batches (tokens, targets), one a step. Returns what the fixture expects, and the smallest routing
    margin of all steps."""
    m, layers = c["model"], c["model"]["num_hidden_layers"] + c["model"]["num_nextn_predict_layers"]
    w = on_tape(weights, dtype)
    state, mean, std = {}, torch.zeros(layers, dtype=torch.float64), torch.ones(layers, dtype=torch.float64)
    series = {name: [] for name in ("loss", "mtp_loss", "balance_loss", "z_loss", "grad_norm", "lr")}
    routers, margin, out = num_routers(m), math.inf, {}
    for step, (tokens, targets) in enumerate(batches, 1):
        losses = step_losses(tokens, targets, w, c, head_divisor(w, m), routing_noise(c, step, mean, std, dtype))
        grads = gradients(losses["total"], w)
        grad_norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))
        lr, clip = learning_rate(c, step), c["train"]["grad_clip"]
        if step == 1:
            out = {"logits": losses["logits"], **{"grad." + name: g for name, g in grads.items()}}
            for what in ("logits", "weight") if is_v2(m) else ():
                name = "router_weights" if what == "weight" else "router_logits"
                out.update({f"{name}.{layer}": x.flatten(0, 1) for layer, x in losses["router_" + what].items()})
        scale = clip / grad_norm if clip and grad_norm > clip else 1
        with torch.no_grad():
            adamw(w, {name: g * scale for name, g in grads.items()}, state, step, lr, c["optimizer"])
            if m["moe_router_enable_expert_bias"]:
                update_bias(w, losses["router_chosen"], m)
        for layer, s in losses["router_logits"].items():
            mean[layer] = 0.9 * mean[layer] + 0.1 * s.double().mean()
            std[layer] = 0.9 * std[layer] + 0.1 * s.double().std(correction=0)
        row = (losses["cross_entropy"], losses["mtp"] / max(m["num_nextn_predict_layers"], 1),
               losses["balance"] / routers, losses["z"] / routers, grad_norm, lr)
        for name, value in zip(series, row):
            series[name].append(float(value))
        margin = min(margin, losses["margin"])
    if not is_v2(m):
        del series["mtp_loss"]
    out.update({name: torch.tensor(values, dtype=torch.float64) for name, values in series.items()})
    out.update({"after." + name: p.detach() for name, p in w.items()})
    if m["router"]["warmup_steps"]:
        out.update({"router_mean": mean, "router_std": std})
    return out, margin


# ----------------------------------------------------------------------------------------------------------------
# Fixtures
# ----------------------------------------------------------------------------------------------------------------

def initial_weights(c):
    """Random weights, large enough that every part of the model matters; rounded to float32, as the file holds them."""
    weights = {}
    for i, (name, shape) in enumerate(weight_shapes(c["model"]).items()):
        x = torch.from_numpy(random_normal(c["train"]["seed"], FIXTURE_NOISE, i, math.prod(shape))).view(shape)
        if "norm" in name:
            x = 1 + 0.2 * x
        elif "embeddings" in name:
            x = 0.5 * x
        elif is_buffer(name) and not c["model"]["moe_router_enable_expert_bias"]:
            x = 0 * x
        else:
            x = (0.2 if name.endswith("bias") else 0.3) * x
        weights[name] = x.float()
    return weights


def fixture_batches(c):
    """The tokens and targets of each step, [batch, L] each: consecutive windows of one random stream."""
    batch, L, seed = c["train"]["batch"], c["data"]["seq_len"], c["train"]["seed"]
    n = STEPS * batch * L
    words = random_words(seed, FIXTURE_NOISE + 1, 0, n + 1)
    stream = torch.from_numpy((words % np.uint64(c["model"]["vocab_size"])).astype(np.int64))
    targets = stream[1:].clone()
    targets[torch.from_numpy(random_words(seed, FIXTURE_NOISE + 2, 0, n) < c["fixture"]["ignore"] * 2**32)] = -1
    tokens, targets = stream[:-1].view(STEPS, batch, L), targets.view(STEPS, batch, L)
    if c["fixture"]["ignore_micro_batch"]:
        for step in range(1, STEPS + 1):
            first = step % 2 * c["train"]["micro_batch"]
            targets[step - 1, first:first + c["train"]["micro_batch"]] = -1
    return list(zip(tokens, targets))


def write_safetensors(path, tensors):
    """Header length, JSON header, data: the whole format. tensors: name -> tensor. Wide types come first, so that every
    element is aligned."""
    dtypes = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
              torch.int32: "I32"}
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, x in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        raw = x.contiguous().view(torch.uint8).numpy().tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtypes[x.dtype], "shape": list(x.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)


def write_json(path, value):
    with open(path, "w") as f:
        f.write(json.dumps(value, indent=2) + "\n")


def yaml_flow(value):
    """A value in YAML's flow style. A float always has its point, which YAML 1.1 wants to see before an exponent."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key}: {yaml_flow(v)}" for key, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(yaml_flow, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        text = repr(value)
        return text.replace("e", ".0e") if "e" in text and "." not in text else text
    return str(value)


def keys_of_class(m):
    """The keys of the model that its class has."""
    m = copy.deepcopy(m)
    if not is_v2(m):
        for key in V2_KEYS:
            del m[key]
        del m["router"]["bias_update_rate"]
    return m


def write_yaml(path, name, c):
    c = {**c, "model": keys_of_class(c["model"])}
    with open(path, "w") as f:
        f.write(f"# Golden fixture {name}, made by scripts/reference.py.\n")
        for section in ("model", "data", "train", "optimizer", "schedule"):
            f.write(f"{section}:\n" + "".join(f"  {key}: {yaml_flow(value)}\n" for key, value in c[section].items()))


def require_margin(name, margin):
    """float32 must choose the same experts."""
    if margin < 1e-4:
        raise SystemExit(f"{name}: a routing decision hangs on {margin:.1e}, expected 1e-4 or more: change train.seed")


def write_case(out, name, c):
    """Makes tests/fixtures/NAME."""
    folder = os.path.join(out, name)
    os.makedirs(folder, exist_ok=True)
    weights, batches = initial_weights(c), fixture_batches(c)
    expected, margin = train(c, weights, batches)
    require_margin(name, margin)
    tensors = {}
    for step, (tokens, targets) in enumerate(batches, 1):
        tensors[f"input.{step}"] = tokens.flatten().int()
        tensors[f"target.{step}"] = targets.flatten().int()
    for key, x in expected.items():
        if is_v2(c["model"]):
            if name == "v2_base" or is_buffer(key) or not key.startswith("after."):
                tensors[key] = x
        else:
            tensors[key] = x.float() if key == "logits" or key.startswith(("grad.", "after.")) else x
    write_yaml(os.path.join(folder, "case.yaml"), name, c)
    write_safetensors(os.path.join(folder, "weights.safetensors"), weights)
    write_safetensors(os.path.join(folder, "expected.safetensors"), tensors)
    shown = {key: " ".join(f"{x:.4g}" for x in expected[key].tolist()) for key in ("loss", "grad_norm", "lr")}
    print(f"{name:16} margin {margin:.1e}  loss {shown['loss']}  grad_norm {shown['grad_norm']}  lr {shown['lr']}")


def huggingface_config(m, dtype):
    """A config.json with the keys that the real ones have."""
    same = {key: value for key, value in keys_of_class(m).items() if key not in ("router", "architecture")}
    if is_v2(m):
        return {
            "architectures": [m["architecture"]], "attention_dropout": 0.0, "embedding_dropout": 0.0, "eos_token_id": 1,
            **same, "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 32768,
            "max_window_layers": 20, "model_type": "bailing_moe", "output_dropout": 0.0, "output_router_logits": False,
            "pad_token_id": 1, "rope_scaling": None, "router_dtype": "fp32", "torch_dtype": dtype, "use_cache": True,
        }
    return {
        "architectures": ["BailingMoeForCausalLM"], "attention_dropout": 0.0, "eos_token_id": 1, "pad_token_id": 1,
        **same, "head_dim": None, "hidden_act": "silu", "initializer_range": 0.006, "max_position_embeddings": 16384,
        "model_type": "bailing_moe", "embedding_dropout": 0.0, "output_dropout": 0.0, "output_router_logits": False,
        "norm_softmax": False, "pretraining_tp": 1, "rope_scaling": None, "torch_dtype": dtype,
        "transformers_version": "4.36.0", "use_cache": True,
    }


def write_huggingface(out, name, c, dtype, shards):
    """Makes tests/fixtures/NAME: the case's weights in a 16-bit type as a Hugging Face directory, the tokens of one
    batch, and their mean cross-entropy by those weights."""
    folder, m = os.path.join(out, name), c["model"]
    os.makedirs(folder, exist_ok=True)
    weights = {key: x if is_buffer(key) else x.to(dtype) for key, x in initial_weights(c).items()}
    names = list(weights)
    if shards == 1:
        write_safetensors(os.path.join(folder, "model.safetensors"), weights)
    else:
        weight_map = {}
        for i in range(shards):
            file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
            part = names[len(names) * i // shards:len(names) * (i + 1) // shards]
            write_safetensors(os.path.join(folder, file), {key: weights[key] for key in part})
            weight_map.update({key: file for key in part})
        total = sum(x.numel() * x.element_size() for x in weights.values())
        write_json(os.path.join(folder, "model.safetensors.index.json"),
                   {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    write_json(os.path.join(folder, "config.json"), huggingface_config(m, str(dtype).removeprefix("torch.")))
    tokens, targets = fixture_batches(c)[0]
    exact = {key: x.double() for key, x in weights.items()}
    losses = step_losses(tokens, targets, exact, c, head_divisor(exact, m))
    require_margin(name, losses["margin"])
    write_safetensors(os.path.join(folder, "expected.safetensors"), {
        "input": tokens.flatten().int(), "target": targets.flatten().int(), "loss": losses["cross_entropy"].view(1)})
    print(f"{name:16} margin {losses['margin']:.1e}  loss {float(losses['cross_entropy']):.10g}")


# ----------------------------------------------------------------------------------------------------------------
# Self-check
# ----------------------------------------------------------------------------------------------------------------

def require(ok, what):
    if not ok:
        raise SystemExit(f"self-check failed: {what}")


def check_philox():
    """The three known answers that Random123 publishes for philox4x32-10, and the moments of the normals."""
    for counter, key, answer in (
            ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
            ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
            ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1")):
        counter, key, answer = ([int(word, 16) for word in text.split()] for text in (counter, key, answer))
        require(philox([counter], key)[0].tolist() == answer, f"philox4x32-10 of {counter} {key}")
    x = random_normal(1, ROUTING_NOISE, 0, 100000)
    require(abs(x.mean()) < 0.01 and abs(x.std() - 1) < 0.01, "normals have mean 0 and deviation 1")


def check_adamw():
    """Five steps of adamw() and of torch.optim.AdamW from the same start."""
    o, lr = BASE["optimizer"], 0.01
    start = {name: torch.from_numpy(random_normal(1, FIXTURE_NOISE, i, 12)).view(shape)
             for i, (name, shape) in enumerate((("matrix", (3, 4)), ("vector", (12,))))}
    w = {name: p.clone() for name, p in start.items()}
    theirs = {name: p.clone().requires_grad_() for name, p in start.items()}
    options = {"lr": lr, "betas": (o["beta1"], o["beta2"]), "eps": o["eps"]}
    optimizer = torch.optim.AdamW([{"params": [theirs["matrix"]], "weight_decay": o["weight_decay"]},
                                   {"params": [theirs["vector"]], "weight_decay": 0.0}], **options)
    state = {}
    for step in range(1, 6):
        g = torch.from_numpy(random_normal(1, FIXTURE_NOISE + 1, step, 12))
        grads = {name: g.view(p.shape) for name, p in w.items()}
        adamw(w, grads, state, step, lr, o)
        for name, p in theirs.items():
            p.grad = grads[name]
        optimizer.step()
    for name in w:
        require(torch.allclose(w[name], theirs[name], rtol=1e-13, atol=1e-15), f"AdamW of the {name}")


def check_choice():
    """choose() against plain loops, with many ties, and with scores below 0, which must not lose to excluded groups."""
    for i, (E, n, kept, k) in enumerate(((6, 1, 1, 2), (12, 3, 2, 3), (8, 4, 2, 4), (9, 3, 1, 3), (8, 2, 2, 3))):
        m = {"num_experts_per_tok": k, "n_group": n, "topk_group": kept}
        scores = torch.from_numpy(random_words(1, FIXTURE_NOISE, i, 100 * E) % np.uint64(7)).view(100, E).double() - 5
        order, _ = choose(scores, m)
        for row, found in zip(scores.tolist(), order.tolist()):
            size = E // n
            best_two = [sum(sorted(row[g * size:(g + 1) * size])[-2:]) for g in range(n)]
            groups = sorted(range(n), key=lambda g: (-best_two[g], g))[:kept]
            experts = [e for e in range(E) if n == 1 or e // size in groups]
            require(found == sorted(experts, key=lambda e: (-row[e], e))[:k], f"choice among {row}")


def check_bias_update():
    """Loads 3, 1, 2 and 2, whose steps have mean 0; then 1, 0, 0 and 0, whose steps have not."""
    chosen = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1], [0, 0, 1, 1]], dtype=torch.bool).view(2, 2, 4)
    w = {"model.layers.3.mlp.gate.expert_bias": torch.tensor([0.5, 0, 0, -0.5], dtype=torch.float64)}
    for chosen, expected in ((chosen, (0.4, 0.1, 0, -0.5)),
                             (torch.eye(4, dtype=torch.bool)[:1], (0.25, 0.15, 0.05, -0.45))):
        update_bias(w, {3: chosen}, {"router": {"bias_update_rate": 0.1}})
        found, = w.values()
        require(np.allclose(found, expected, rtol=0, atol=1e-15), f"bias {found.tolist()}, expected {expected}")


def check_gradients(name, c):
    """Autograd's gradient of one step against central differences, three elements of every weight. The head's norms
    stay what they were: they are constants. Returns the largest difference, each over its weight's largest gradient."""
    m = c["model"]
    w = on_tape(initial_weights(c))
    layers, (tokens, targets) = m["num_hidden_layers"] + m["num_nextn_predict_layers"], fixture_batches(c)[0]
    # Step 2's noise, where there is a routing warmup: in step 1 the router's logits do not reach the choice yet.
    divisor, noise = head_divisor(w, m), routing_noise(c, 2, [0.0] * layers, [1.0] * layers, torch.float64)
    loss = lambda: step_losses(tokens, targets, w, c, divisor, noise)["total"]
    grads = gradients(loss(), w)
    worst, h = 0, 1e-5
    for i, (key, p) in enumerate(w.items()):
        flat, size = p.detach().view(-1), float(grads[key].abs().max())
        for at in random_words(c["train"]["seed"], FIXTURE_NOISE + 3, i, 3) % np.uint64(flat.numel()):
            at, was = int(at), float(flat[int(at)])
            with torch.no_grad():
                flat[at] = was + h
                above = float(loss())
                flat[at] = was - h
                below = float(loss())
                flat[at] = was
            error = abs((above - below) / (2 * h) - float(grads[key].view(-1)[at])) / (size + 1e-4)
            worst = max(worst, error)
            require(error < 1e-5, f"{name}: gradient of {key}[{at}], relative error {error:.1e}")
    return worst


def check_conditioning(name, c):
    """The same training in float32: how near a correct float32 program comes, each array by norm. It must be well
    below the 1e-5 that ling's tests ask for."""
    weights, batches = initial_weights(c), fixture_batches(c)
    exact, margin = train(c, weights, batches)
    rounded, _ = train(c, weights, batches, torch.float32)
    worst = (0, "")
    for key, x in exact.items():
        error = float((rounded[key].double() - x).norm() / max(float(x.norm()), 1e-30))
        worst = max(worst, (error, key))
    require(worst[0] < 3e-6, f"{name}: float32 is {worst[0]:.1e} away in {worst[1]}")
    return worst, margin


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", metavar="DIR", help="make every fixture in DIR")
    parser.add_argument("--check", action="store_true", help="test this file itself")
    args = parser.parse_args()
    if not args.out and not args.check:
        parser.error("expected --out DIR or --check")
    torch.set_num_threads(1)  # one order of summation, so that a fixture comes out the same again
    cases = all_cases()
    check_philox()
    check_adamw()
    check_choice()
    check_bias_update()
    if args.check:
        for name, c in cases.items():
            worst, margin = check_conditioning(name, c)
            print(f"{name:16} finite differences {check_gradients(name, c):.1e}  margin {margin:.1e}  "
                  f"float32 {worst[0]:.1e} ({worst[1]})", flush=True)
    if args.out:
        for name, c in cases.items():
            write_case(args.out, name, c)
        write_huggingface(args.out, "huggingface_shards", cases["base"], torch.bfloat16, 2)
        write_huggingface(args.out, "huggingface_f16", cases["base"], torch.float16, 1)
        write_huggingface(args.out, "huggingface_v2", cases["v2_base"], torch.bfloat16, 1)


if __name__ == "__main__":
    main()
