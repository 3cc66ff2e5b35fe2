#!/usr/bin/env python3
"""Dumps of training steps of a PyTorch model, for `ling align`. docs/align.md says what is in a dump.

    dump-torch.py --case NAME --out DIR [--steps N]
        The model of scripts/reference.py, of the case NAME there. Makes DIR/torch, its dump, and what `ling train` needs
        to make its own from the same weights and tokens: DIR/run.yaml, DIR/model, DIR/tokens.bin. It prints the two
        commands that follow.
    dump-torch.py --huggingface MODEL --tokens FILE.bin --seq-len L --batch B --out DIR
        One step of a BailingMoeForCausalLM, by the code that comes with it (needs the package transformers), on the
        first B windows of a file of token ids, uint16: forward and backward pass of the cross-entropy, in float32,
        without an update.
    dump-torch.py --check
        Tests the hooks of the second form on a small model whose modules have the same names.

In a program of your own:

    dump_torch = importlib.import_module("dump-torch")
    dump = dump_torch.Dump("DIR/step-0000001.safetensors", step=1)
    dump.hook(model)                 # a BailingMoeForCausalLM in training mode
    loss = ...                       # the forward pass
    dump.add("loss", loss)
    loss.backward()
    dump.parameters("gradient", {name: p.grad for name, p in model.named_parameters()})
    dump.write()

PyTorch is in Debian 13 (python3-torch); scripts/reference.py says how to have it in a folder of its own.
"""
import argparse
import json
import math
import os
import re
import struct
import sys
import tempfile

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import reference  # the script beside this one

# The outputs of a layer's operations in the order of execution, and behind each its parameters. Only a layer for
# multi-token prediction has the first four and the last one.
LAYER = [
    ("embedding", None), ("mtp / enorm", "enorm"), ("mtp / hnorm", "hnorm"), ("mtp / eh_proj", "eh_proj"),
    ("attention / norm", "input_layernorm"), ("attention / qkv", "attention.query_key_value"),
    ("attention / qk norm", "attention.(query|key)_layernorm"), ("attention / rope", None), ("attention / core", None),
    ("attention / output", "attention.dense"), ("ffn / norm", "post_attention_layernorm"),
    ("router / logits", "mlp.gate"), ("router / softmax", None), ("router / top-k", None), ("router / weights", None),
    ("experts / gate_up", r"mlp.experts.\d+.(gate|up)_proj"), ("experts / down", r"mlp.experts.\d+.down_proj"),
    ("shared / gate_up", r"mlp.shared_experts.\w+"), ("dense / gate_up", r"mlp.\w+_proj"), ("output", None),
    ("norm", "final_layernorm"),
]


class Dump:
    """What one training step computes."""

    def __init__(self, path, step):
        self.path, self.step = path, step
        self.outputs, self.gradients = {}, {}  # name -> micro-batch -> [T of it, ...]
        self.others = {}                       # name -> tensor
        self.micro_batch, self.tokens = -1, 0  # the current one, and its tokens

    def begin(self, tokens):
        """A micro-batch of so many tokens begins."""
        self.micro_batch, self.tokens = self.micro_batch + 1, tokens

    def record(self, name, x, layout=None, shape=None, place=..., gradient=True):
        """Records x, an output of the current micro-batch, and the gradient that will reach it. layout brings both to
        the rows [T, columns] of the dump. x may be a part alone: of a tensor of this shape, what is at `place`."""
        layout = layout or (lambda y: y.reshape(self.tokens, -1))
        tokens, micro_batch = self.tokens, self.micro_batch
        rows = layout(x.detach())
        pieces, gradients = self.outputs.setdefault(name, {}), self.gradients.setdefault(name, {})
        piece = pieces.setdefault(micro_batch, rows.new_zeros(shape or rows.shape))
        piece[place] = rows

        def caught(g):
            self.tokens, current = tokens, self.tokens
            gradients.setdefault(micro_batch, torch.zeros_like(piece))[place] = layout(g.detach())
            self.tokens = current

        if gradient and x.requires_grad:
            x.register_hook(caught)
        return x

    def add(self, name, x):
        """Another number: "loss", "mtp loss", "balance loss", "z-loss", "gradient norm"."""
        self.others[name] = torch.as_tensor(x).detach().clone().reshape(-1)

    def token_losses(self, targets, layer=""):
        """The cross-entropy of each token; targets [T]: -1 where it does not count. layer: "layer 4 / " for those of an
        MTP layer."""
        logits = torch.cat(list(self.outputs[layer + "head / logits"].values()))
        losses = F.cross_entropy(logits, targets.reshape(-1), ignore_index=-1, reduction="none")
        self.outputs[layer + "head / loss"] = {0: losses}

    def parameters(self, what, tensors):
        """what: "gradient" (before the clip), "moment 1", "moment 2" or "updated"; tensors: by parameter's name."""
        self.others.update({f"{name} / {what}": x.detach().clone() for name, x in tensors.items() if x is not None})

    def ordered(self):
        """All tensors, name -> tensor, in the order of execution."""
        out = {}

        def joined(name, pieces, suffix=""):
            if pieces.get(name):
                out[name + suffix] = torch.cat([pieces[name][i] for i in sorted(pieces[name])])

        def backward(name, parameter):
            joined(name, self.gradients, " / gradient")
            if parameter:
                expression = re.compile(parameter + r"\.(weight|bias) / gradient")
                out.update({key: x for key, x in self.others.items() if expression.fullmatch(key)})

        def layer_backward(i):
            for name, parameter in reversed(LAYER):
                backward(f"layer {i} / {name}", parameter and f"model.layers.{i}.{parameter}")

        every = range(1 + max([int(name.split()[1]) for name in self.outputs if name.startswith("layer ")], default=-1))
        mtp = [i for i in every if f"layer {i} / embedding" in self.outputs]
        layers = [i for i in every if i not in mtp]
        for name in ["embedding", *(f"layer {i} / {name}" for i in layers for name, _ in LAYER), "norm",
                     *(f"layer {i} / {name}" for i in mtp for name, _ in LAYER), "head / logits", "head / loss"]:
            joined(name, self.outputs)
        out.update({name: self.others[name] for name in ("loss",) if name in self.others})
        for i in mtp:
            joined(f"layer {i} / head / logits", self.outputs)
            joined(f"layer {i} / head / loss", self.outputs)
        out.update({name: self.others[name] for name in ("mtp loss", "balance loss", "z-loss") if name in self.others})
        joined("head / logits", self.gradients, " / gradient")
        for i in mtp:
            joined(f"layer {i} / head / logits", self.gradients, " / gradient")
        backward("head / logits", "lm_head")
        for i in reversed(mtp):
            layer_backward(i)
        backward("norm", "model.norm")
        for i in reversed(layers):
            layer_backward(i)
        backward("embedding", "model.word_embeddings")
        out.update({name: x for name, x in self.others.items() if name not in out})  # the update
        return out

    def write(self):
        """Writes the file: the order of its data is the order of execution. (The package safetensors sorts by name.)"""
        dtypes = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
                  torch.int32: "I32"}
        header, data, at = {"__metadata__": {"format": "ling dump 1", "step": str(self.step)}}, [], 0
        for name, x in self.ordered().items():
            x = x.int() if x.dtype == torch.int64 else x
            raw = x.contiguous().cpu().view(torch.uint8).numpy().tobytes()
            header[name] = {"dtype": dtypes[x.dtype], "shape": list(x.shape), "data_offsets": [at, at + len(raw)]}
            data.append(raw)
            at += len(raw)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
        with open(self.path, "wb") as f:
            f.write(struct.pack("<Q", len(text)) + text + b"".join(data))

    # ---- hooks for a BailingMoeForCausalLM ----

    def hook(self, model):
        """From now on, records what the modules of a BailingMoeForCausalLM compute. It must be in training mode, where
        each expert is called once, with the rows of its tokens."""
        inner = model.model
        inner.word_embeddings.register_forward_hook(self._embedding)
        for i, layer in enumerate(inner.layers):
            name = f"layer {i} / "
            self._after(layer.input_layernorm, name + "attention / norm")
            self._before(layer.attention.dense, name + "attention / core")
            self._before(layer.post_attention_layernorm, name + "attention / output")
            self._after(layer.post_attention_layernorm, name + "ffn / norm")
            self._after(layer, name + "output")
            if hasattr(layer.mlp, "gate"):
                self._hook_experts(layer.mlp, name)
            else:
                self._hook_swiglu(layer.mlp, name + "dense / gate_up")
        self._hook_rope(inner, model.config)
        self._after(inner.norm, "norm")
        self._after(model, "head / logits")

    def _embedding(self, module, args, out):
        self.begin(args[0].numel())
        self.record("embedding", out)

    def _after(self, module, name):
        def hook(module, args, out):
            self.record(name, out if torch.is_tensor(out) else out.logits if hasattr(out, "logits") else out[0])
        module.register_forward_hook(hook)

    def _before(self, module, name):
        def hook(module, args):
            self.record(name, args[0])
        module.register_forward_pre_hook(hook)

    def _hook_rope(self, inner, config):
        """The rotation is a function in the file of the model, apply_rotary_pos_emb(q, k, ...), which is called once a
        layer with q and k [B, heads, L, d]. v, the last columns of the product before it, is not rotated."""
        code, layer = sys.modules[type(inner.layers[0].attention).__module__], [0]
        rotate, nh, nkv = code.apply_rotary_pos_emb, config.num_attention_heads, config.num_key_value_heads

        def product(i):
            def hook(module, args, out):
                layer[0], d = i, out.shape[-1] // (nh + 2 * nkv)
                self.record(f"layer {i} / attention / qkv", out)
                self.record(f"layer {i} / attention / rope", out, lambda x: x.reshape(self.tokens, -1)[:, -nkv * d:],
                            (self.tokens, out.shape[-1]), (..., slice((nh + nkv) * d, None)))
            return hook

        def rotated(q, k, *args, **kwargs):
            results, first = rotate(q, k, *args, **kwargs), 0
            for x in results:
                width = x.shape[1] * x.shape[3]
                self.record(f"layer {layer[0]} / attention / rope", x, heads_last(self.tokens), None,
                            (..., slice(first, first + width)))
                first += width
            return results

        for i, block in enumerate(inner.layers):
            block.attention.query_key_value.register_forward_hook(product(i))
        code.apply_rotary_pos_emb = rotated

    def _hook_swiglu(self, mlp, name, routing=None, expert=None):
        """gate and up as one tensor, the gate's columns first. Of an expert: in the places of its tokens."""
        def hook(part):
            def record(module, args, out):
                columns = slice(part * out.shape[-1], (part + 1) * out.shape[-1])
                if routing:
                    chosen = routing["index"] == expert
                    self.record(name, out, lambda x: x, (*chosen.shape, 2 * out.shape[-1]),
                                (*chosen.nonzero(as_tuple=True), columns))
                else:
                    self.record(name, out, None, (self.tokens, 2 * out.shape[-1]), (..., columns))
            return record
        mlp.gate_proj.register_forward_hook(hook(0))
        mlp.up_proj.register_forward_hook(hook(1))

    def _hook_experts(self, mlp, name):
        """The router, whose module gives (choices [T, k], weights [T, k], logits), and the experts."""
        routing = {}

        def gate(module, args, out):
            index, weights, logits = out
            routing["index"] = index.detach().reshape(self.tokens, -1)
            routing["weights"] = weights.detach().reshape(self.tokens, -1)
            self.record(name + "router / logits", logits)
            self.record(name + "router / softmax", logits.detach().softmax(-1, dtype=weights.dtype))
            self.record(name + "router / top-k", index)
            self.record(name + "router / weights", weights)

        def down(e):
            def hook(module, args, out):
                chosen = routing["index"] == e
                self.record(name + "experts / down", out * routing["weights"][chosen][:, None], lambda x: x,
                            (*chosen.shape, out.shape[-1]), (chosen,), gradient=False)
            return hook

        mlp.gate.register_forward_hook(gate)
        for e, expert in enumerate(mlp.experts):
            self._hook_swiglu(expert, name + "experts / gate_up", routing, e)
            expert.register_forward_hook(down(e))
        if getattr(mlp, "shared_experts", None) is not None:
            self._hook_swiglu(mlp.shared_experts, name + "shared / gate_up")


def heads_last(tokens):
    """The layout [B, heads, L, d] -> [T, heads d]."""
    return lambda x: x.transpose(1, 2).reshape(tokens, -1)


# ----------------------------------------------------------------------------------------------------------------
# The model of scripts/reference.py
# ----------------------------------------------------------------------------------------------------------------

def reference_recorder(dump):
    """What takes the place of reference.record(), which each operation of that model calls with its output."""
    order = {}  # layer -> the chosen experts [T, k] of the current micro-batch

    def record(name, x):
        if name == "embedding":
            dump.begin(x.shape[0] * x.shape[1])
        found = re.fullmatch(r"model\.layers\.(\d+)\.(?:([\w.]+?)\.)?(?:experts\.(\d+)\.)?([\w -]+)", name)
        if not found:
            return dump.record(name.replace(".", " / "), x)
        layer, group, expert, operation = found.groups()
        prefix = f"layer {layer} / "
        if group == "mlp" and expert:  # all experts compute all tokens: of each, the rows of its own
            chosen = order[layer] == int(expert)
            return dump.record(f"{prefix}experts / {operation}", x, lambda y: y.flatten(0, 1)[chosen.any(1)],
                               (*chosen.shape, x.shape[-1]), (chosen,), operation != "down")
        if operation == "top-k":
            order[layer] = x.flatten(0, 1)
        if operation == "weights":  # [B, L, E]
            chosen = order[layer]  # of this micro-batch, also when the gradient comes
            return dump.record(prefix + "router / weights", x, lambda y: y.flatten(0, 1).gather(1, chosen))
        if operation in ("qk norm", "rope"):
            return dump.record(prefix + "attention / " + operation, x, heads_last(dump.tokens))
        if group == "mlp.shared_experts" or (group == "mlp" and operation == "gate_up"):
            return dump.record(f"{prefix}{'dense' if group == 'mlp' else 'shared'} / gate_up", x)
        group = f"{'router' if group == 'mlp' else group} / " if group else ""
        return dump.record(prefix + group + operation, x, gradient=operation != "softmax")

    return record


def dump_case(name, c, folder, steps):
    """Trains the case's model, and writes a dump of each step. Returns the tokens of all steps, in order."""
    m = c["model"]
    layers, mtp, routers = m["num_hidden_layers"], m["num_nextn_predict_layers"], reference.num_routers(m)
    batches, w = reference.fixture_batches(c), reference.on_tape(reference.initial_weights(c))
    state, mean, std = {}, [0.0] * (layers + mtp), [1.0] * (layers + mtp)
    for step, (tokens, targets) in enumerate(batches[:steps], 1):
        dump = Dump(os.path.join(folder, f"step-{step:07d}.safetensors"), step)
        reference.record = reference_recorder(dump)
        losses = reference.step_losses(tokens, targets, w, c, reference.head_divisor(w, m),
                                       reference.routing_noise(c, step, mean, std, torch.float64))
        grads = reference.gradients(losses["total"], w)
        norm, clip = math.sqrt(sum(float(g.square().sum()) for g in grads.values())), c["train"]["grad_clip"]
        dump.token_losses(targets)
        for i in range(mtp):
            dump.token_losses(reference.shifted(targets, i + 1, -1), f"layer {layers + i} / ")
        dump.add("loss", losses["cross_entropy"])
        if mtp:
            dump.add("mtp loss", losses["mtp"] / mtp)
        dump.add("balance loss", losses["balance"] / routers)
        dump.add("z-loss", losses["z"] / routers)
        dump.parameters("gradient", {key: g for key, g in grads.items() if not reference.is_buffer(key)})
        dump.add("gradient norm", torch.tensor(norm, dtype=torch.float64))
        scale = clip / norm if clip and norm > clip else 1
        with torch.no_grad():
            reference.adamw(w, {key: g * scale for key, g in grads.items()}, state, step,
                            reference.learning_rate(c, step), c["optimizer"])
            if m["moe_router_enable_expert_bias"]:
                reference.update_bias(w, losses["router_chosen"], m)
        for key, p in w.items():
            zero = torch.zeros_like(p)  # a buffer's moments stay 0
            moments = state.get(key, (zero, zero))
            for what, x in (("moment 1", moments[0]), ("moment 2", moments[1]), ("updated", p)):
                dump.parameters(what, {key: x})
        dump.write()
        for layer, s in losses["router_logits"].items():
            mean[layer] = 0.9 * mean[layer] + 0.1 * float(s.double().mean())
            std[layer] = 0.9 * std[layer] + 0.1 * float(s.double().std(correction=0))
    return torch.cat([tokens.flatten() for tokens, _ in batches] + [batches[-1][1].flatten()[-1:]])


def make_case(name, out, steps):
    """What --case makes."""
    c = reference.all_cases()[name]
    if c["fixture"]["ignore"] or c["fixture"]["ignore_micro_batch"]:
        raise SystemExit(f"case {name} has targets that do not count, which a file of tokens cannot say; take another one")
    tokens = dump_case(name, c, os.path.join(out, "torch"), steps)
    reference.write_huggingface(out, "model", c, torch.float32, 1)
    os.remove(os.path.join(out, "model", "expected.safetensors"))
    config_path = os.path.join(out, "model", "config.json")
    config = json.load(open(config_path))
    config["head_dim"] = c["model"]["head_dim"]
    reference.write_json(config_path, config)
    tokens.numpy().astype("<u2").tofile(os.path.join(out, "tokens.bin"))
    c["data"].update({"train": [{"path": os.path.join(out, "tokens.bin"), "dtype": "uint16"}]})
    c["train"].update({"output_dir": os.path.join(out, "run"), "init_from": os.path.join(out, "model"),
                       "dump": {"steps": list(range(1, steps + 1)), "dir": os.path.join(out, "ling")}})
    reference.write_yaml(os.path.join(out, "run.yaml"), name, c)
    print(f"ling train {out}/run.yaml train.stop_at_step={steps}\nling align {out}/torch {out}/ling")


# ----------------------------------------------------------------------------------------------------------------
# Models of Hugging Face's form
# ----------------------------------------------------------------------------------------------------------------

def dump_step(model, tokens, targets, path):
    """Dumps one forward and backward pass of the mean cross-entropy. tokens, targets: [B, L]."""
    dump = Dump(path, 1)
    dump.hook(model.train())
    out = model(tokens)
    logits = out if torch.is_tensor(out) else out.logits
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    loss.backward()
    dump.token_losses(targets)
    dump.add("loss", loss)
    dump.parameters("gradient", {name: p.grad for name, p in model.named_parameters()})
    dump.write()


def dump_huggingface(directory, file, seq_len, batch, out):
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(directory, torch_dtype=torch.float32, trust_remote_code=True)
    ids = torch.from_numpy(np.fromfile(file, "<u2", batch * seq_len + 1).astype(np.int64))
    dump_step(model, ids[:-1].view(batch, seq_len), ids[1:].view(batch, seq_len),
              os.path.join(out, "step-0000001.safetensors"))


def apply_rotary_pos_emb(q, k, theta):
    return reference.rope(q, theta), reference.rope(k, theta)


class Norm(torch.nn.Module):
    def __init__(self, weight, eps):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(weight), eps

    def forward(self, x):
        return reference.rms_norm(x, self.weight, self.eps)


class Module(torch.nn.Module):
    """A module with these members and this forward(self, ...)."""

    def __init__(self, forward, **members):
        super().__init__()
        self.compute = forward
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, *args):
        return self.compute(self, *args)


class Attention(Module):
    """A class of this file, in which hook() then looks for apply_rotary_pos_emb."""


def linear(weight):
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    layer.weight = torch.nn.Parameter(weight)
    return layer


def small_model(c, w):
    """A model whose modules have the names, calls and results of BailingMoeForCausalLM's."""
    m = c["model"]
    nh, nkv, d, k = m["num_attention_heads"], m["num_key_value_heads"], m["head_dim"], m["num_experts_per_tok"]

    def attention(self, x):
        B, L, _ = x.shape
        q, key, v = self.query_key_value(x).view(B, L, nh + 2 * nkv, d).transpose(1, 2).split([nh, nkv, nkv], 1)
        q, key = apply_rotary_pos_emb(q, key, m["rope_theta"])
        y = F.scaled_dot_product_attention(q, key.repeat_interleave(nh // nkv, 1), v.repeat_interleave(nh // nkv, 1),
                                           is_causal=True)
        return self.dense(y.transpose(1, 2).reshape(B, L, nh * d))

    def swiglu(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    def make_swiglu(prefix):
        return Module(swiglu, **{f"{part}_proj": linear(w[f"{prefix}{part}_proj.weight"]) for part in ("gate", "up", "down")})

    def gate(self, x):
        logits = F.linear(x.view(-1, x.shape[-1]), self.weight)
        weights, index = torch.topk(logits.softmax(-1), k, sorted=False)
        return index, weights / weights.sum(-1, keepdim=True) if k > 1 and m["norm_topk_prob"] else weights, logits

    def moe(self, x):
        index, weights, _ = self.gate(x)
        rows, flat = x.view(-1, x.shape[-1]).repeat_interleave(k, 0), index.view(-1)
        y = torch.empty_like(rows)
        for e, expert in enumerate(self.experts):
            y[flat == e] = expert(rows[flat == e])
        return (y.view(*weights.shape, -1) * weights[..., None]).sum(1).view(x.shape) + self.shared_experts(x)

    def layer(self, x):
        x = x + self.attention(self.input_layernorm(x))
        return (x + self.mlp(self.post_attention_layernorm(x)),)

    def make_layer(i):
        prefix, eps = f"model.layers.{i}.", m["rms_norm_eps"]
        return Module(
            layer, input_layernorm=Norm(w[prefix + "input_layernorm.weight"], eps),
            attention=Attention(attention, query_key_value=linear(w[prefix + "attention.query_key_value.weight"]),
                                dense=linear(w[prefix + "attention.dense.weight"])),
            post_attention_layernorm=Norm(w[prefix + "post_attention_layernorm.weight"], eps),
            mlp=Module(moe, gate=Module(gate, weight=torch.nn.Parameter(w[prefix + "mlp.gate.weight"])),
                       experts=torch.nn.ModuleList(make_swiglu(f"{prefix}mlp.experts.{e}.")
                                                   for e in range(m["num_experts"])),
                       shared_experts=make_swiglu(prefix + "mlp.shared_experts.")))

    def inner(self, tokens):
        x = self.word_embeddings(tokens)
        for block in self.layers:
            x = block(x)[0]
        return self.norm(x)

    def head(self, tokens):
        weight = self.lm_head.weight
        return F.linear(self.model(tokens), weight / (torch.norm(weight, p=2, dim=0, keepdim=True) + 1e-7).detach())

    embedding = torch.nn.Embedding.from_pretrained(w["model.word_embeddings.weight"], freeze=False)
    model = Module(head, lm_head=linear(w["lm_head.weight"]), model=Module(
        inner, word_embeddings=embedding, layers=torch.nn.ModuleList(map(make_layer, range(m["num_hidden_layers"]))),
        norm=Norm(w["model.norm.weight"], m["rms_norm_eps"])))
    model.config = argparse.Namespace(num_attention_heads=nh, num_key_value_heads=nkv)
    return model


def read_dump(path):
    data = open(path, "rb").read()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    header.pop("__metadata__")
    types = {"F64": "<f8", "F32": "<f4", "I32": "<i4"}
    return {name: np.frombuffer(data, types[t["dtype"]], math.prod(t["shape"]), 8 + size + t["data_offsets"][0])
            .reshape(t["shape"]) for name, t in header.items()}


def check():
    """The hooks of a model of modules against the recorder of the reference, on the same weights and tokens."""
    c = reference.merged(reference.BASE, {"model": {"router": {"balance_loss_coef": 0.0, "z_loss_coef": 0.0}},
                                          "train": {"micro_batch": 4}})
    (tokens, targets), *_ = reference.fixture_batches(c)
    weights = {name: x.double() for name, x in reference.initial_weights(c).items()}
    with tempfile.TemporaryDirectory() as folder:
        dump_case("base", c, folder, 1)
        reference.record = lambda name, x: x
        dump_step(small_model(c, weights), tokens, targets, os.path.join(folder, "modules"))
        a, b = (read_dump(os.path.join(folder, name)) for name in ("step-0000001.safetensors", "modules"))
    # In a the choices are sorted by weight; b's come in any order.
    for name in [name for name in a if name.endswith("top-k")]:
        order = np.argsort(a[name], 1, kind="stable"), np.argsort(b[name], 1, kind="stable")
        for key in [name, *(name.replace("router / top-k", part) for part in (
                "router / weights", "router / weights / gradient", "experts / gate_up", "experts / gate_up / gradient",
                "experts / down"))]:
            for x, o in zip((a, b), order):
                x[key] = np.take_along_axis(x[key], o[..., None] if x[key].ndim == 3 else o, 1)
    missing = [name for name in a if name not in b and not re.search(r"moment|updated|norm$|balance loss|z-loss", name)]
    extra = [name for name in b if name not in a]
    if missing or extra:
        raise SystemExit(f"only one of the two has: {missing + extra}")
    worst = max((float(np.linalg.norm(a[name] - b[name]) / max(np.linalg.norm(a[name]), 1e-300)), name) for name in b)
    if worst[0] > 1e-5:  # the loss of dump_step is in float32
        raise SystemExit(f"{worst[1]} differs by {worst[0]:.1e}")
    print(f"{len(b)} tensors agree, the worst to {worst[0]:.1e}: {worst[1]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=reference.all_cases(), help="a case of scripts/reference.py")
    parser.add_argument("--steps", type=int, default=2, help="steps of the case, 1 to 5 (default: 2)")
    parser.add_argument("--huggingface", metavar="MODEL", help="a Hugging Face directory of a BailingMoeForCausalLM")
    parser.add_argument("--tokens", metavar="FILE.bin")
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--out", metavar="DIR")
    parser.add_argument("--check", action="store_true", help="test this file itself")
    args = parser.parse_args()
    if args.check:
        check()
    elif args.case and args.out and 1 <= args.steps <= reference.STEPS:
        make_case(args.case, args.out, args.steps)
    elif args.huggingface and args.tokens and args.seq_len and args.batch and args.out:
        dump_huggingface(args.huggingface, args.tokens, args.seq_len, args.batch, args.out)
    else:
        parser.error("expected --case NAME --out DIR, or --huggingface MODEL --tokens FILE.bin --seq-len L --batch B --out "
                     "DIR, or --check")


if __name__ == "__main__":
    main()
