#!/usr/bin/env python3
"""Writes the demo checkpoint's entry of tools/common/doctor/known_models.json: what transformers answers in float32 with
the same dequantised weights (reference_model.py). The other entries stay as they are.

    python3 scripts/make_known_answers.py       # seconds on one core

Needs torch, transformers (made with 5.17.0), safetensors, numpy. The greedy answers are those of
tests/vectors/demo/greedy.json (verify_demo.py); run that first if the demo has changed.
"""

import argparse
import json
import pathlib
import struct

import torch
from transformers import AutoTokenizer

import reference_model

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEMO = ROOT / "models" / "demo"
DOCTOR = ROOT / "tools" / "common" / "doctor"
NAME = "quern demo"
TEXT = "The capital of France is"
TEXT_TOKENS = 128  # examination.cpp: kMaxTextTokens
TRACE_TOKENS = 512  # model_trace.h: kMaxTraceTokens
EMBEDDING_VALUES = 8


def conversations(cases: list) -> list:
    """The ids of questions and greedy answers one after another, as far as one step takes them."""
    ids = []
    for case in cases:
        more = case["prompt"] + case["generated"]
        if case["task"] != "tools" and len(ids) + len(more) <= TRACE_TOKENS:
            ids += more
    return ids


@torch.no_grad()
def read(model, ids: list):
    """Log-probabilities of each next token, the likeliest one after each, and hidden states after each layer."""
    residual = []
    hooks = [layer.register_forward_hook(lambda _m, _i, out: residual.append(out[0] if isinstance(out, tuple) else out)) for layer in model.model.layers]
    logits = model(torch.tensor([ids])).logits[0].double()
    for hook in hooks:
        hook.remove()
    logs = torch.log_softmax(logits, -1)
    nexts = logs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    rms = [float(r.double().pow(2).mean().sqrt()) for r in residual]
    return nexts, logits.argmax(-1).tolist(), rms


def weight_bytes(path: pathlib.Path) -> int:
    """As quern counts them: vectors and the convolution are F32 once loaded."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    total = 0
    for name, t in json.loads(raw[8 : 8 + size]).items():
        if name != "__metadata__":
            begin, end = t["data_offsets"]
            total += (end - begin) * (2 if len(t["shape"]) != 2 and t["dtype"] == "BF16" else 1)
    return total


def entry() -> dict:
    model = reference_model.load(DEMO)
    vocab = AutoTokenizer.from_pretrained(DEMO)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight[: len(vocab)])  # padding rows are never sampled
    config = model.config
    text_ids = vocab.encode(TEXT, add_special_tokens=False)
    cases = json.loads((ROOT / "tests/vectors/demo/greedy.json").read_text())
    ids = conversations(cases)
    logs, likeliest, rms = read(model, ids)
    nats = {}
    for text in json.loads((DOCTOR / "texts.json").read_text()):
        part = vocab.encode(text["text"], add_special_tokens=False)[:TEXT_TOKENS]
        nats[text["kind"]] = round(-float(read(model, part)[0].mean()), 4)
    first = cases[3]["prompt"] + cases[3]["generated"]
    row = model.model.embed_tokens.weight[text_ids[0]][:EMBEDDING_VALUES].tolist()
    return {
        "name": NAME,
        "agreed": "transformers 5.17 in float32",
        "shape": {"architecture": "qwen3_5_moe", "layers": config.num_hidden_layers, "width": config.hidden_size,
                  "experts": config.num_experts, "experts_used": config.num_experts_per_tok, "vocab_rows": config.vocab_size},
        "vocabulary": {"text": TEXT, "ids": text_ids},
        "embedding": {"token": text_ids[0], "row": row, "tolerance": 0},
        "answers": [{"prompt": c["prompt"], "answer": c["generated"]} for c in cases if c["task"] != "tools"],
        "likeliest": [{"prompt": first, "answer": read(model, first)[1]}],
        "numbers": {"weight_bytes": weight_bytes(DEMO / "model.safetensors"), "prompt": ids, "log_probability": [round(x, 5) for x in logs.tolist()], "residual_rms": [round(x, 6) for x in rms]},
        "nats": nats,
        "recall_tokens": 0,
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    path = DOCTOR / "known_models.json"
    known = json.loads(path.read_text())
    known["models"] = [m for m in known["models"] if m["name"] != NAME] + [entry()]
    lines = [",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in m.items()) for m in known["models"]]
    path.write_text('{\n"sources": ' + json.dumps(known["sources"]) + ',\n"models": [\n' + ",\n".join("{" + x + "}" for x in lines) + "\n]\n}\n")
    print(f"{path}: {NAME}, {len(known['models'])} entries")


if __name__ == "__main__":
    main()
