#!/usr/bin/env python3
"""quern's logits beside transformers' in BF16 and in float32, for a backend that computes in BF16.

    compare_bf16.py MODEL --quern build/quern [--device cuda] [--extra -ngl all]

Runs a random prompt three ways: quern in one step, quern in a step for each token, transformers in BF16;
and, if the device's memory holds the model, in float32 as the judge: rounding activations to BF16 moves any
implementation away from it, transformers too. The weights are read once: those in BF16 are the others, rounded. Errors are |a - b| / |b| over all positions, and over the last --last,
where history counts most. Passes if quern's error against the judge is at most --tolerance and at most --ratio times
that of transformers' own BF16 run, both ways, over all and over the last positions. Without float32 the BF16 run is
the judge, and --tolerance the only limit. Needs torch, transformers and safetensors.
"""

import argparse
import gc
import json
import pathlib
import sys
import time

import numpy as np
import torch

import compare_logits
import reference_model


def random_ids(folder, length, seed):
    config = json.loads((pathlib.Path(folder) / "config.json").read_text())
    vocab = config.get("text_config", config)["vocab_size"]
    return np.random.default_rng(seed).integers(0, vocab, length).astype(np.int32)


def float32_fits(folder, device):
    """Whether the weights in float32, counted from the BF16 model's parameters, leave some room on the device."""
    if torch.device(device).type != "cuda":
        return True
    config = reference_model.text_config(folder)
    with torch.device("meta"):
        count = sum(p.numel() for p in reference_model.model_class(config)(config).parameters())
    return 4 * count + 6e9 < torch.cuda.mem_get_info(device)[0]


def release(device):
    """Gives back memory that nothing uses; what is left must hold the largest matrix once more."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def reference_logits(folder, ids, device, dtypes):
    """Logits of transformers in each type, the most precise one first."""
    begin = time.monotonic()
    model = reference_model.load(folder, device, dtypes[0])
    print(f"  transformers: load {time.monotonic() - begin:.1f} s", flush=True)
    out = []
    for dtype in dtypes:
        begin = time.monotonic()
        release(device)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        out.append(reference_model.logits(model, ids))
        print(f"  transformers {dtype}: {time.monotonic() - begin:.1f} s", flush=True)
    del model
    release(device)
    return [logits.to(device, torch.float64) for logits in out]


def quern_logits(a, ids, rows):
    begin = time.monotonic()
    extra = ["-ub", str(rows), "-c", str(len(ids) + 8), *a.extra]
    logits = compare_logits.run_quern(a.quern, a.model, ids, 1, extra)[0]
    print(f"  quern, {rows} tokens a step: {time.monotonic() - begin:.1f} s with load", flush=True)
    if not np.isfinite(logits).all():
        raise SystemExit("NaN or infinite logits")
    return torch.from_numpy(logits)


def error(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())


def errors(title, ours, theirs, last):
    """Prints the line; the two errors that count: over all positions, and over the last."""
    rows = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    both = error(ours, theirs), error(ours[-last:], theirs[-last:])
    best = float((ours.argmax(-1) == theirs.argmax(-1)).double().mean())
    print(f"{title}: error {both[0]:.2e}, last {last} positions {both[1]:.2e}, worst position {int(rows.argmax())} "
          f"{rows.max():.2e}, best token {best:.1%}", flush=True)
    return both


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog=__doc__.split("\n", 1)[1],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--quern", required=True)
    parser.add_argument("--length", type=int, default=300, help="tokens of the prompt (300)")
    parser.add_argument("--last", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda", help="torch device of transformers (cuda)")
    parser.add_argument("--tolerance", type=float, default=2e-2)
    parser.add_argument("--ratio", type=float, default=1.5)
    parser.add_argument("--extra", nargs=argparse.REMAINDER, default=[], help="further arguments for quern run")
    a = parser.parse_args()
    ids = random_ids(a.model, a.length, a.seed)
    ours = {"quern, one step": quern_logits(a, ids, a.length), "quern, a step a token": quern_logits(a, ids, 1)}
    judged = float32_fits(a.model, a.device)
    if judged:
        judge, bf16 = reference_logits(a.model, ids, a.device, [torch.float32, torch.bfloat16])
    else:
        print("float32 does not fit the device: transformers in BF16 is the judge")
        judge = bf16 = reference_logits(a.model, ids, a.device, [torch.bfloat16])[0]
    ours = {title: logits.to(a.device, torch.float64) for title, logits in ours.items()}
    limits = (a.tolerance, a.tolerance)
    if judged:
        own = errors("transformers BF16 to float32", bf16, judge, a.last)
        limits = tuple(min(a.tolerance, a.ratio * e) for e in own)
    errors("one step to a step a token", *ours.values(), a.last)
    ok = True
    for title, logits in ours.items():
        if judged:
            errors(f"{title}, to transformers BF16", logits, bf16, a.last)
        found = errors(f"{title}, to the judge", logits, judge, a.last)
        ok = ok and all(e <= limit for e, limit in zip(found, limits))
    print(f"limits: all {limits[0]:.2e}, last {limits[1]:.2e}: {'ok' if ok else 'FAIL'}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
