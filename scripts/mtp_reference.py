#!/usr/bin/env python3
"""Drafts of an MTP layer in float64, written apart from quern's code: the expected values of tests/mtp.cpp.

    scripts/mtp_reference.py            writes tests/vectors/mtp again, after comparing the text model with the goldens of
                                        tests/vectors/parity, which are transformers' own
    scripts/mtp_reference.py --ids IDS --drafts N [--npy FOUND.npy] MODEL
                                        prints the N drafted ids after a prompt and its greedy token; compares their logits
                                        with those that `quern run --dump-draft-logits FOUND.npy` wrote

The whole model is computed again for every row: no cache, no chunks. Formats: BF16, F16, F32, FP8 (tensor, channel, block),
NVFP4 (compressed-tensors, ModelOpt); experts stacked or one by one. Formulas: Hugging Face transformers' qwen3_5_moe;
DeepSeek-V3 (2024), section 2.2, with the hidden state after the model's final norm, as vLLM has it. Needs numpy.
"""

import argparse
import json
import pathlib
import re

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent / "tests/vectors"
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "U8": "u1", "F8_E4M3": "u1", "I32": "<i4", "I64": "<i8"}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array([m * 2.0**-9 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127])


def read_safetensors(path):
    """name -> (dtype, array of the stored type)."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    out = {}
    for name, t in json.loads(data[8:8 + size]).items():
        if name != "__metadata__":
            begin, end = (8 + size + o for o in t["data_offsets"])
            out[name] = t["dtype"], np.frombuffer(data[begin:end], DTYPES[t["dtype"]]).reshape(t["shape"])
    return out


def write_safetensors(path, tensors):
    header, blobs, at = {}, [], 0
    for name, (dtype, array) in tensors.items():
        blob = np.ascontiguousarray(array, DTYPES[dtype]).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def e4m3(codes):
    return np.where(codes & 0x80, -1, 1) * E4M3[codes & 0x7F]


def values(dtype, a):
    """Stored numbers as float64."""
    if dtype == "BF16":
        return (a.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return e4m3(a) if dtype == "F8_E4M3" else a.astype(np.float64)


class Weights:
    """Matrices and vectors of a checkpoint by official name."""

    def __init__(self, files):
        self.tensors = {}
        for path in files:
            for name, tensor in read_safetensors(path).items():
                if "visual" not in name:
                    text = re.sub(r"^(model\.|language_model\.)+", "", name)
                    self.tensors[text if text.startswith(("mtp.", "lm_head.")) else "text." + text] = tensor

    def __contains__(self, name):
        return name in self.tensors

    def vector(self, name):
        return values(*self.tensors[name])

    def matrix(self, module):
        part = {s: self.tensors[f"{module}.{s}"] for s in
                ("weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_scale_inv", "weight_global_scale")
                if f"{module}.{s}" in self.tensors}
        dtype, codes = part.get("weight_packed") or part["weight"]
        if dtype == "U8":
            w = np.stack((codes & 15, codes >> 4), -1).reshape(len(codes), -1)
            w = np.where(w & 8, -1, 1) * E2M1[w & 7] * np.repeat(values(*part["weight_scale"]), 16, 1)
            return w / values(*part["weight_global_scale"]) if "weight_packed" in part else \
                w * values(*part["weight_scale_2"])
        w = values(dtype, codes)
        if dtype != "F8_E4M3":
            return w
        scale = values(*(part.get("weight_scale") or part["weight_scale_inv"]))
        n, k = w.shape
        if scale.size in (1, n):
            return w * scale.reshape(-1, 1)
        return w * np.repeat(np.repeat(scale, 128, 0)[:n], 128, 1)[:, :k]

    def expert(self, prefix, e, which):
        if f"{prefix}experts.gate_up_proj" not in self:
            return self.matrix(f"{prefix}experts.{e}.{which}")
        if which == "down_proj":
            return self.vector(f"{prefix}experts.down_proj")[e]
        half = np.split(self.vector(f"{prefix}experts.gate_up_proj")[e], 2)
        return half[which == "up_proj"]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


class Model:
    def __init__(self, folder, beside=()):
        folder = pathlib.Path(folder)
        root = json.loads((folder / "config.json").read_text())
        self.c = root.get("text_config", root)
        self.w = Weights(sorted(folder.glob("*.safetensors")) + list(beside))
        rope = self.c.get("rope_parameters") or self.c
        self.theta = rope["rope_theta"]
        self.rotary = int(self.c["head_dim"] * (rope.get("partial_rotary_factor") or self.c["partial_rotary_factor"]))

    def scaled(self, x):
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + self.c["rms_norm_eps"])

    def norm(self, x, name):
        return self.scaled(x) * (1 + self.w.vector(name))

    def rotate(self, x):
        """[T, heads, d] at positions 0..T-1."""
        half = self.rotary // 2
        angle = np.arange(len(x))[:, None] * self.theta ** (-np.arange(half) * 2 / self.rotary)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        a, b = x[..., :half], x[..., half:2 * half]
        return np.concatenate((a * cos - b * sin, b * cos + a * sin, x[..., 2 * half:]), -1)

    def attention(self, x, p):
        h, g, d = self.c["num_attention_heads"], self.c["num_key_value_heads"], self.c["head_dim"]
        rows = len(x)
        q, gate = np.split((x @ self.w.matrix(p + "q_proj").T).reshape(rows, h, 2 * d), 2, -1)
        k = (x @ self.w.matrix(p + "k_proj").T).reshape(rows, g, d)
        v = np.repeat((x @ self.w.matrix(p + "v_proj").T).reshape(rows, g, d), h // g, 1)
        q = self.rotate(self.norm(q, p + "q_norm.weight"))
        k = np.repeat(self.rotate(self.norm(k, p + "k_norm.weight")), h // g, 1)
        score = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(d)
        score[:, np.triu(np.ones((rows, rows), bool), 1)] = -np.inf
        weight = np.exp(score - score.max(-1, keepdims=True))
        y = np.einsum("hqk,khd->qhd", weight / weight.sum(-1, keepdims=True), v)
        return (y * sigmoid(gate)).reshape(rows, -1) @ self.w.matrix(p + "o_proj").T

    def delta(self, x, p):
        c, rows = self.c, len(x)
        nk, nv, dk, dv = (c[f"linear_{n}"] for n in
                          ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"))
        u = x @ self.w.matrix(p + "in_proj_qkv").T
        taps = self.w.vector(p + "conv1d.weight")[:, 0]
        padded = np.concatenate((np.zeros((taps.shape[1] - 1, u.shape[1])), u))
        u = silu(sum(padded[i:i + rows] * taps[:, i] for i in range(taps.shape[1])))
        q, k, v = np.split(u, (nk * dk, 2 * nk * dk), 1)

        def unit(t):
            t = t.reshape(rows, nk, dk)
            return np.repeat(t / np.sqrt((t * t).sum(-1, keepdims=True) + 1e-6), nv // nk, 1)
        q, k, v = unit(q) / np.sqrt(dk), unit(k), v.reshape(rows, nv, dv)
        step = np.logaddexp(0, x @ self.w.matrix(p + "in_proj_a").T + self.w.vector(p + "dt_bias"))
        decay = np.exp(-np.exp(self.w.vector(p + "A_log")) * step)
        beta = sigmoid(x @ self.w.matrix(p + "in_proj_b").T)
        state, y = np.zeros((nv, dk, dv)), np.zeros((rows, nv, dv))
        for t in range(rows):
            state = state * decay[t][:, None, None]
            change = (v[t] - np.einsum("hk,hkv->hv", k[t], state)) * beta[t][:, None]
            state = state + k[t][:, :, None] * change[:, None]
            y[t] = np.einsum("hk,hkv->hv", q[t], state)
        z = (x @ self.w.matrix(p + "in_proj_z").T).reshape(rows, nv, dv)
        y = self.scaled(y) * self.w.vector(p + "norm.weight") * silu(z)
        return y.reshape(rows, -1) @ self.w.matrix(p + "out_proj").T

    def mlp(self, x, p):
        return (silu(x @ self.w.matrix(p + "gate_proj").T) * (x @ self.w.matrix(p + "up_proj").T)) \
            @ self.w.matrix(p + "down_proj").T

    def mixture(self, x, p):
        score = x @ self.w.matrix(p + "gate").T
        chance = np.exp(score - score.max(-1, keepdims=True))
        best = np.argsort(-score, -1, kind="stable")[:, :self.c["num_experts_per_tok"]]
        y = self.mlp(x, p + "shared_expert.") * sigmoid(x @ self.w.matrix(p + "shared_expert_gate").T)
        for t, row in enumerate(x):
            share = chance[t, best[t]] / chance[t, best[t]].sum()
            for e, s in zip(best[t], share):
                gate, up, down = (self.w.expert(p, e, n) for n in ("gate_proj", "up_proj", "down_proj"))
                y[t] += s * (down @ (silu(gate @ row) * (up @ row)))
        return y

    def layer(self, x, p):
        n = self.norm(x, p + "input_layernorm.weight")
        full = p + "self_attn.o_proj.weight" in self.w or p + "self_attn.o_proj.weight_packed" in self.w
        x = x + (self.attention(n, p + "self_attn.") if full else self.delta(n, p + "linear_attn."))
        n = self.norm(x, p + "post_attention_layernorm.weight")
        return x + (self.mixture(n, p + "mlp.") if "num_experts" in self.c else self.mlp(n, p + "mlp."))

    def head(self, y):
        has = any(f"lm_head.{s}" in self.w for s in ("weight", "weight_packed"))
        return y @ self.w.matrix("lm_head" if has else "text.embed_tokens").T

    def hidden(self, ids):
        """After the final norm, [T, width]."""
        x = self.w.matrix("text.embed_tokens")[ids]
        for i in range(self.c["num_hidden_layers"]):
            x = self.layer(x, f"text.layers.{i}.")
        return self.norm(x, "text.norm.weight")

    def drafts(self, ids, hidden, n):
        """Ids drafted after `ids`, of which all but the last have hidden states, and their logits."""
        tokens, states, drafted, logits = list(ids[1:]), list(hidden), [], []
        for _ in range(n):
            e = self.norm(self.w.matrix("text.embed_tokens")[tokens], "mtp.pre_fc_norm_embedding.weight")
            h = self.norm(np.array(states), "mtp.pre_fc_norm_hidden.weight")
            y = self.norm(self.layer(np.concatenate((e, h), 1) @ self.w.matrix("mtp.fc").T, "mtp.layers.0."),
                          "mtp.norm.weight")
            logits.append(self.head(y[-1]))
            drafted.append(int(np.argmax(logits[-1])))
            tokens.append(drafted[-1])
            states.append(y[-1])
        return drafted, np.array(logits)


def bf16(x):
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return "BF16", ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def nearest(x, table):
    return np.abs(np.abs(x)[..., None] - table).argmin(-1).astype(np.uint8)


def fp8_codes(x):
    return "F8_E4M3", nearest(x, E4M3) | np.where(x < 0, 0x80, 0).astype(np.uint8)


def fp8(w):
    """Blocks of 128 by 128; these matrices are smaller than two."""
    scale = np.array([[np.abs(w[i:i + 128, j:j + 128]).max() / 448 for j in range(0, w.shape[1], 128)]
                      for i in range(0, w.shape[0], 128)], np.float32)
    full = np.repeat(np.repeat(scale, 128, 0), 128, 1)[:w.shape[0], :w.shape[1]]
    return {"weight": fp8_codes(w / full), "weight_scale_inv": ("F32", scale)}


def nvfp4(w):
    blocks = w.reshape(len(w), -1, 16)
    one = np.float32(np.abs(w).max() / (6 * 448))
    scale = fp8_codes(np.abs(blocks).max(-1) / 6 / one)
    codes = blocks / np.maximum(e4m3(scale[1])[..., None] * one, 1e-30)
    codes = (nearest(codes, E2M1) | np.where(codes < 0, 8, 0).astype(np.uint8)).reshape(w.shape)
    return {"weight": ("U8", codes[:, 0::2] | codes[:, 1::2] << 4), "weight_scale": scale,
            "weight_scale_2": ("F32", np.array(one))}


def random_mtp(c, quantize, stacked, seed):
    """An MTP layer for a text model of this configuration: the layer's matrices by `quantize`, all else in BF16."""
    rng = np.random.default_rng(seed)
    width, d, out = c["hidden_size"], c["head_dim"], {}

    def add(module, rows, cols, plain=False):
        w = rng.standard_normal((rows, cols)) * 1.5 / np.sqrt(cols)
        for suffix, t in ({"weight": bf16(w)} if plain else quantize(w)).items():
            out[f"mtp.{module}.{suffix}"] = t

    def norm(name, size):
        out[f"mtp.{name}.weight"] = bf16(rng.standard_normal(size) * 0.2)
    add("fc", width, 2 * width, plain=True)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "layers.0.input_layernorm",
                 "layers.0.post_attention_layernorm"):
        norm(name, width)
    a, m = "layers.0.self_attn.", "layers.0.mlp."
    norm(a + "q_norm", d)
    norm(a + "k_norm", d)
    for name, rows in (("q", 2 * c["num_attention_heads"]), ("k", c["num_key_value_heads"]), ("v", c["num_key_value_heads"])):
        add(f"{a}{name}_proj", rows * d, width)
    add(a + "o_proj", width, c["num_attention_heads"] * d)

    def mlp(p, size):
        for name in ("gate_proj", "up_proj"):
            add(p + name, size, width)
        add(p + "down_proj", width, size)
    if "num_experts" not in c:
        mlp(m, c["intermediate_size"])
        return out
    add(m + "gate", c["num_experts"], width, plain=True)
    add(m + "shared_expert_gate", 1, width, plain=True)
    mlp(m + "shared_expert.", c["shared_expert_intermediate_size"])
    f, e = c["moe_intermediate_size"], c["num_experts"]
    if stacked:
        out[f"mtp.{m}experts.gate_up_proj"] = bf16(rng.standard_normal((e, 2 * f, width)) * 1.2 / np.sqrt(width))
        out[f"mtp.{m}experts.down_proj"] = bf16(rng.standard_normal((e, width, f)) * 1.8 / np.sqrt(f))
    else:
        for i in range(e):
            mlp(f"{m}experts.{i}.", f)
    return out


CASES = [("base", "bf16", "stacked"), ("base", "bf16", "bf16"), ("base", "bf16", "fp8"), ("base", "bf16", "nvfp4"),
         ("dense", "bf16", "bf16"), ("dense", "bf16", "fp8"), ("dense", "bf16", "nvfp4"),
         ("tied_text", "bf16", ""), ("tied_text", "ct", ""), ("vision_mtp", "bf16", ""), ("vision_mtp", "modelopt", "")]
QUANTIZE = {"stacked": lambda w: {"weight": bf16(w)}, "bf16": lambda w: {"weight": bf16(w)}, "fp8": fp8, "nvfp4": nvfp4}
PROMPT, STEPS, DRAFTS = 200, 12, 3


def write_case(model, fmt, mtp):
    """The MTP layer's file, where the checkpoint brings none, and the drafts after each token of its greedy answer."""
    folder = ROOT / "parity" / model / fmt
    golden = {n: t[1] for n, t in read_safetensors(ROOT / f"parity/{model}/{fmt}.golden.safetensors").items()}
    name, beside = f"{model}-{fmt}" + (f"-{mtp}" if mtp else ""), []
    for seed in range(1000):
        if mtp:
            config = Model(folder).c
            beside = [ROOT / f"mtp/{name}.safetensors"]
            write_safetensors(beside[0], random_mtp(config, QUANTIZE[mtp], mtp == "stacked", seed))
        m = Model(folder, beside)
        ids = np.concatenate((golden["prompt_ids"], golden["greedy_ids"][:STEPS]))
        if seed == 0:
            full = golden["prompt_ids"]
            found = m.head(m.hidden(full))[golden["positions"]]
            error = np.linalg.norm(found - golden["logits"]) / np.linalg.norm(golden["logits"])
            assert error < 1e-5, (name, error)
        hidden = m.hidden(ids)
        all_drafts, all_logits, margin = [], [], np.inf
        for end in range(PROMPT + 1, len(ids) + 1):
            drafted, logits = m.drafts(ids[:end], hidden[:end - 1], DRAFTS)
            all_drafts.append(drafted)
            all_logits.append(logits)
            best = np.sort(logits, -1)
            margin = min(margin, ((best[:, -1] - best[:, -2]) / np.abs(logits).max(-1)).min())
        if margin > 1e-3 or not mtp:
            break
    print(f"{name:24s} seed {seed}  text model {error:.1e}  margin {margin:.1e}", flush=True)
    write_safetensors(ROOT / f"mtp/{name}.golden.safetensors", {
        "ids": ("I32", ids.astype(np.int32)), "prompt": ("I32", np.array([PROMPT])),
        "drafts": ("I32", np.array(all_drafts)), "logits": ("F32", np.array(all_logits))})


def compare(arguments):
    m = Model(arguments.model)
    ids = [int(i) for i in re.findall(r"\d+", pathlib.Path(arguments.ids).read_text())]
    ids.append(int(np.argmax(m.head(m.hidden(ids)[-1]))))
    drafted, logits = m.drafts(ids, m.hidden(ids[:-1]), arguments.drafts)
    print("drafted", *drafted)
    if arguments.npy:
        found = np.load(arguments.npy)
        print("error", *(f"{np.linalg.norm(f - e) / np.linalg.norm(e):.2e}" for f, e in zip(found, logits)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--ids")
    parser.add_argument("--drafts", type=int, default=DRAFTS)
    parser.add_argument("--npy")
    arguments = parser.parse_args()
    if arguments.model:
        return compare(arguments)
    (ROOT / "mtp").mkdir(exist_ok=True)
    for case in CASES:
        write_case(*case)


if __name__ == "__main__":
    main()
