#!/usr/bin/env python3
"""Checks models/demo with a dequantiser of its own (numpy, straight from the format's description) and writes the
greedy goldens of tests/vectors/demo/greedy.json from transformers in float32.

usage: verify_demo.py [--limit TOKENS] [--write]
"""
import argparse
import json
import struct
import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(Path(__file__).parent))
from demo import evaluate  # noqa: E402

DEMO = ROOT / "models" / "demo"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6] + [-0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def e4m3(byte: int) -> float:
    sign, e, m = (-1.0 if byte & 0x80 else 1.0), byte >> 3 & 15, byte & 7
    if e == 15 and m == 7:
        return float("nan")
    return sign * (m * 2.0**-9 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7))


E4M3 = np.array([e4m3(b) for b in range(256)], np.float32)


def read(path: Path) -> dict:
    """name -> (dtype, array); own reader, so that a fault of the writer's library would show."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header, out, used = json.loads(raw[8 : 8 + size]), {}, 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        a, b = entry["data_offsets"]
        kind = {"BF16": np.uint16, "U8": np.uint8, "F8_E4M3": np.uint8, "F32": np.float32}[entry["dtype"]]
        out[name] = (entry["dtype"], np.frombuffer(raw[8 + size + a : 8 + size + b], kind).reshape(entry["shape"]))
        used += b - a
    assert used == len(raw) - 8 - size, "bytes that no tensor covers"
    return out


def dequantise(file: dict) -> dict:
    out = {}
    for name, (dtype, array) in file.items():
        if dtype == "BF16":
            out[name] = (array.astype(np.uint32) << 16).view(np.float32)
        elif name.endswith(".weight_packed"):
            base = name.removesuffix("_packed")
            scale, g = file[base + "_scale"], file[base + "_global_scale"]
            assert scale[0] == "F8_E4M3" and g[0] == "F32" and g[1].shape == (1,), base
            n, half = array.shape
            codes = np.stack([array & 15, array >> 4], -1).reshape(n, half * 2)
            local = E4M3[scale[1]]
            assert scale[1].shape == (n, half * 2 // 16) and np.isfinite(local).all() and (local > 0).all(), base
            assert 1e-3 < 2688 / g[1][0] < 1e3, base
            out[base] = E2M1[codes] * np.repeat(local, 16, axis=1) / g[1][0]
    return out


def shared_scales(file: dict) -> None:
    groups = [("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("gate_proj", "up_proj")]
    for name, (_, g) in file.items():
        for first, *others in groups:
            if name.endswith(first + ".weight_global_scale"):
                for other in others:
                    assert file[name.replace(first, other)][1][0] == g[0], name
                amax = max(E4M3[file[name.replace(first, x).replace("_global", "")][1]].max() for x in (first, *others))
                assert amax == 448, (name, amax)


def load_model(weights: dict):
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForCausalLM

    config = Qwen3_5MoeConfig(**json.loads((DEMO / "config.json").read_text())).text_config
    config.dtype = "float32"
    model = Qwen3_5MoeForCausalLM(config).float().eval()
    state = {}
    for name in model.state_dict():
        outer = name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
        if name.endswith("experts.gate_up_proj"):
            base = outer.removesuffix("gate_up_proj")
            stack = [np.concatenate([weights.pop(f"{base}{e}.{p}.weight") for p in ("gate_proj", "up_proj")]) for e in range(config.num_experts)]
            state[name] = torch.from_numpy(np.stack(stack))
        elif name.endswith("experts.down_proj"):
            base = outer.removesuffix("down_proj")
            state[name] = torch.from_numpy(np.stack([weights.pop(f"{base}{e}.down_proj.weight") for e in range(config.num_experts)]))
        else:
            state[name] = torch.from_numpy(np.ascontiguousarray(weights.pop(outer)))
    assert not weights, f"tensors that the model does not use: {list(weights)[:5]}"
    model.load_state_dict(state)
    model.set_experts_implementation("eager")
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    from transformers import AutoTokenizer

    file = read(DEMO / "model.safetensors")
    shared_scales(file)
    model = load_model(dequantise(file))
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    records = [json.loads(line) for line in (DEMO / "eval.jsonl").read_text().splitlines()]
    chosen, seen = [], set()
    for r in records:
        if r["task"] not in seen and r["task"] not in ("calendar", "chat", "system"):
            seen.add(r["task"])
            chosen.append(r)
    out = []
    for r in chosen:
        ids = tokenizer.encode(evaluate.prompt_of(r), add_special_tokens=False)
        (made, ended), = evaluate.greedy(model, [ids], args.limit, "cpu")
        print(r["task"], len(ids), repr(tokenizer.decode(made)), "ended" if ended else "")
        out.append({"task": r["task"], "prompt": ids, "generated": made, "ended": ended})
    if args.write:
        target = ROOT / "tests" / "vectors" / "demo" / "greedy.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("[\n" + ",\n".join(json.dumps(x) for x in out) + "\n]\n")
    print(f"{len(file)} tensors, every one used; {len(out)} golden generations")


if __name__ == "__main__":
    main()
