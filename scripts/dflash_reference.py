#!/usr/bin/env python3
"""Drafts of a DFlash drafter in float64, written apart from quern's code: the expected values of tests/dflash.cpp.

    scripts/dflash_reference.py         writes tests/vectors/dflash again: tiny drafters with random weights for checkpoints of
                                        tests/vectors/parity, and what they draft
    scripts/dflash_reference.py --ids IDS --drafter DIR --drafts N [--npy FOUND.npy] [--causal] MODEL
                                        prints the N drafted ids after a prompt and its greedy token; compares their logits
                                        with those that `quern run --dump-draft-logits FOUND.npy` wrote. --causal: rows of a
                                        block see none after them in layers with windows, where config.json is silent

Everything is computed again for every block: no cache. Formulas: models/dflash.h; transformers' qwen3 (norms, rotation,
YaRN). Needs numpy.
"""

import argparse
import json
import math
import pathlib
import re

import numpy as np

from mtp_reference import ROOT, Model, bf16, read_safetensors, silu, values, write_safetensors


class Drafter:
    def __init__(self, folder):
        folder = pathlib.Path(folder)
        self.c = c = json.loads((folder / "config.json").read_text())
        own = c.get("dflash_config") or {}
        self.t = {re.sub("^model\\.", "", n): values(*t) for f in sorted(folder.glob("*.safetensors"))
                  for n, t in read_safetensors(f).items()}
        self.taps = own.get("target_layer_ids", c.get("target_layer_ids"))
        self.mask = own.get("mask_token_id", c.get("mask_token_id"))
        self.causal = c.get("is_causal", own.get("causal", c.get("causal")))
        self.kinds = c.get("layer_types") or ["full_attention"] * c["num_hidden_layers"]
        self.frequency, self.scale = self.rotary()

    def rotary(self):
        c, d = self.c, self.c["head_dim"]
        r = c.get("rope_parameters") or c.get("rope_scaling") or {}
        theta = r.get("rope_theta", c.get("rope_theta"))
        plain = 1 / theta ** (np.arange(d // 2) * 2 / d)
        if r.get("rope_type", r.get("type", "default")) == "default":
            return plain, 1.0
        original, factor = r["original_max_position_embeddings"], r["factor"]

        def corrected(turns):
            return d * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
        low = max(math.floor(corrected(r.get("beta_fast", 32))), 0)
        high = min(math.ceil(corrected(r.get("beta_slow", 1))), d - 1)
        ramp = np.clip((np.arange(d // 2) - low) / max(high - low, 0.001), 0, 1)
        return plain / factor * ramp + plain * (1 - ramp), 0.1 * math.log(factor) + 1

    def norm(self, x, name):
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + self.c["rms_norm_eps"]) * self.t[name + ".weight"]

    def linear(self, x, name):
        return x @ self.t[name + ".weight"].T

    def heads(self, x):
        return x.reshape(len(x), -1, self.c["head_dim"])

    def rotate(self, x, positions):
        angle = positions[:, None, None] * self.frequency
        cos, sin = np.cos(angle) * self.scale, np.sin(angle) * self.scale
        a, b = np.split(x, 2, -1)
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), -1)

    def keys(self, x, p, positions):
        k = self.norm(self.heads(self.linear(x, p + "k_proj")), p + "k_norm")
        return self.rotate(k, positions), self.heads(self.linear(x, p + "v_proj"))

    def attention(self, x, fused, layer, causal_windows):
        p, rows, before = f"layers.{layer}.self_attn.", len(x), len(fused)
        window = self.c["sliding_window"] if self.kinds[layer] == "sliding_attention" else None
        causal = self.causal if self.causal is not None else window is not None and causal_windows
        at = np.arange(before + rows)
        q = self.rotate(self.norm(self.heads(self.linear(x, p + "q_proj")), p + "q_norm"), at[before:])
        k, v = (np.concatenate(parts) for parts in zip(self.keys(fused, p, at[:before]), self.keys(x, p, at[before:])))
        group = q.shape[1] // k.shape[1]
        k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
        score = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(self.c["head_dim"])
        gap = at[before:, None] - at[None]
        seen = np.ones_like(gap, bool)
        if causal:
            seen &= gap >= 0
        if window is not None:
            seen &= np.abs(gap) < window
        score = np.where(seen, score, -np.inf)
        weight = np.exp(score - score.max(-1, keepdims=True))
        y = np.einsum("hqk,khd->qhd", weight / weight.sum(-1, keepdims=True), v)
        return self.linear(y.reshape(rows, -1), p + "o_proj")

    def drafts(self, model, ids, taps, n, causal_windows):
        """Ids drafted after `ids`, of which all but the last have taps [T, A * width], and their logits."""
        fused = self.norm(self.linear(taps[:len(ids) - 1], "fc"), "hidden_norm")
        x = model.w.matrix("text.embed_tokens")[[ids[-1]] + [self.mask] * n]
        for i in range(self.c["num_hidden_layers"]):
            p = f"layers.{i}."
            x = x + self.attention(self.norm(x, p + "input_layernorm"), fused, i, causal_windows)
            y = self.norm(x, p + "post_attention_layernorm")
            x = x + self.linear(silu(self.linear(y, p + "mlp.gate_proj")) * self.linear(y, p + "mlp.up_proj"),
                                p + "mlp.down_proj")
        logits = model.head(self.norm(x, "norm")[1:])
        return logits.argmax(-1), logits


def tapped(model, ids, layers):
    """The residual stream after each of these layers, side by side, and the logits."""
    x, after = model.w.matrix("text.embed_tokens")[ids], {}
    for i in range(model.c["num_hidden_layers"]):
        x = after[i] = model.layer(x, f"text.layers.{i}.")
    return np.concatenate([after[i] for i in layers], 1), model.head(model.norm(x, "text.norm.weight"))


def config(model, **more):
    return {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_act": "silu", "attention_bias": False,
            "hidden_size": model.c["hidden_size"], "vocab_size": model.c["vocab_size"], "intermediate_size": 48,
            "num_target_layers": model.c["num_hidden_layers"], "rms_norm_eps": 1e-6, **more}


def new_kind(model):
    """As the newer drafters: windows and a full layer, keys in dflash_config."""
    last = model.c["num_hidden_layers"] - 1
    return config(model, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                  layer_types=["sliding_attention", "sliding_attention", "full_attention"], sliding_window=24,
                  use_sliding_window=True, rope_parameters={"rope_theta": 1e4, "rope_type": "default"},
                  dflash_config={"block_size": 8, "mask_token_id": 77, "target_layer_ids": sorted({0, last // 2, last})})


def old_kind(model):
    """As the older ones: full layers, YaRN, keys at the top."""
    return config(model, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=1, head_dim=32, rope_theta=1e4,
                  rope_scaling={"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
                                "original_max_position_embeddings": 64},
                  is_causal=False, block_size=8, mask_token_id=77, target_layer_ids=[1])


def tiny_window(model):
    """A window shorter than a block, said to be causal."""
    return new_kind(model) | {"sliding_window": 5, "is_causal": True, "num_hidden_layers": 1,
                              "layer_types": ["sliding_attention"]}


def random_drafter(c, seed):
    rng = np.random.default_rng(seed)
    own, out = c.get("dflash_config") or c, {}
    width, d, m = c["hidden_size"], c["head_dim"], c["intermediate_size"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d

    def matrix(name, rows, cols, gain=1.5):
        out[name + ".weight"] = bf16(rng.standard_normal((rows, cols)) * gain / np.sqrt(cols))

    def norm(name, size):
        out[name + ".weight"] = bf16(1 + rng.standard_normal(size) * 0.2)
    matrix("fc", width, len(own["target_layer_ids"]) * width)
    norm("hidden_norm", width)
    norm("norm", width)
    for i in range(c["num_hidden_layers"]):
        p = f"layers.{i}."
        for name, rows, cols in (("q_proj", q, width), ("k_proj", kv, width), ("v_proj", kv, width), ("o_proj", width, q)):
            matrix(p + "self_attn." + name, rows, cols)
        norm(p + "self_attn.q_norm", d)
        norm(p + "self_attn.k_norm", d)
        norm(p + "input_layernorm", width)
        norm(p + "post_attention_layernorm", width)
        for name, rows, cols in (("gate_proj", m, width), ("up_proj", m, width), ("down_proj", width, m)):
            matrix(p + "mlp." + name, rows, cols, 2)
    return out


CASES = [("new", "base", new_kind), ("old", "base", old_kind), ("dense", "dense", new_kind), ("tiny", "base", tiny_window)]
PROMPT, STEPS, DRAFTS = 200, 12, 7


def write_case(name, parity, kind):
    model = Model(ROOT / "parity" / parity / "bf16")
    golden = {n: t[1] for n, t in read_safetensors(ROOT / f"parity/{parity}/bf16.golden.safetensors").items()}
    ids = np.concatenate((golden["prompt_ids"], golden["greedy_ids"][:STEPS]))
    folder = ROOT / "dflash" / name
    folder.mkdir(parents=True, exist_ok=True)
    c = kind(model)
    (folder / "config.json").write_text(json.dumps(c, indent=1) + "\n")
    taps, logits = tapped(model, ids, (c.get("dflash_config") or c)["target_layer_ids"])
    error = np.linalg.norm(logits[golden["positions"]] - golden["logits"]) / np.linalg.norm(golden["logits"])
    assert error < 1e-5, (name, error)
    for seed in range(1000):
        write_safetensors(folder / "model.safetensors", random_drafter(c, seed))
        drafter = Drafter(folder)
        out, margin = {"ids": ("I32", ids.astype(np.int32)), "prompt": ("I32", np.array([PROMPT]))}, np.inf
        for rule in ("causal", "symmetric"):
            blocks = [drafter.drafts(model, ids[:end], taps, DRAFTS, rule == "causal")
                      for end in range(PROMPT + 1, len(ids) + 1)]
            drafted, logits = (np.array(part) for part in zip(*blocks))
            best = np.sort(logits, -1)
            margin = min(margin, ((best[..., -1] - best[..., -2]) / np.abs(logits).max(-1)).min())
            out |= {f"drafts.{rule}": ("I32", drafted), f"logits.{rule}": ("F32", logits)}
        if margin > 1e-3:
            break
    print(f"{name:8s} {parity:8s} seed {seed}  margin {margin:.1e}", flush=True)
    write_safetensors(ROOT / f"dflash/{name}.golden.safetensors", out)


def compare(arguments):
    model, drafter = Model(arguments.model), Drafter(arguments.drafter)
    ids = [int(i) for i in re.findall(r"\d+", pathlib.Path(arguments.ids).read_text())]
    taps, logits = tapped(model, ids, drafter.taps)
    ids.append(int(np.argmax(logits[-1])))
    drafted, logits = drafter.drafts(model, ids, taps, arguments.drafts, arguments.causal)
    print("drafted", *drafted)
    if arguments.npy:
        found = np.load(arguments.npy)
        print("error", *(f"{np.linalg.norm(f - e) / np.linalg.norm(e):.2e}" for f, e in zip(found, logits)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--ids")
    parser.add_argument("--drafter")
    parser.add_argument("--drafts", type=int, default=DRAFTS)
    parser.add_argument("--npy")
    parser.add_argument("--causal", action="store_true")
    arguments = parser.parse_args()
    if arguments.model:
        return compare(arguments)
    for case in CASES:
        write_case(*case)


if __name__ == "__main__":
    main()
