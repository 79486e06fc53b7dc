#!/usr/bin/env python3
"""Makes tests/vectors/parity: tiny random Qwen3_5Moe and Qwen3_5 checkpoints in every weight format, and their logits
by transformers.

    python3 scripts/make_parity_vectors.py            # all of them, under a minute on one core
    python3 scripts/make_parity_vectors.py --only base --search

Needs torch, transformers (made with 5.17.0), safetensors, numpy. Seeds are fixed; --search looks for the next seed
that passes the checks below and prints it for parity_models.py.

<model>/<format>/                    the checkpoint as a user would have it (config, weights; no tokenizer)
<model>/<format>.golden.safetensors  prompt_ids I32 [200]; greedy_ids I32 [32] that follow it; positions I32 [P];
                                     logits F32 [P, V] of these prompt positions; greedy_margin F32 [32], the gap
                                     between the best and second logit of each step
manifest.json                        what each model is for, and the measured margins

A model is taken only if a correct implementation cannot fail by chance and a wrong one is likely to: clear greedy
margins, no near tie in the routers, and logits that react to the first prompt token and to every layer.
"""

import argparse
import pathlib
import shutil
import tempfile

import numpy as np
import torch
from safetensors.torch import save_file

import parity_formats
import parity_models
import quant_formats
import reference_model

OUT = pathlib.Path(__file__).resolve().parent.parent / "tests" / "vectors" / "parity"
STEPS = 32
LIMITS = {"margin": 2e-3, "router_gap": 1e-4, "distinct": 8, "first_token": 1e-3, "layer": 0.03, "noise": 1e-5}


def relative(a, b):
    return float((a - b).norm() / b.norm())


def router_gaps(model, ids, top_k):
    """Smallest distance between the last chosen and the first rejected expert's logit, over layers and tokens."""
    gaps, hooks = [float("inf")], []

    def hook(_module, _inputs, output):
        ordered = output[0].float().sort(dim=-1, descending=True).values
        if ordered.shape[-1] > top_k:
            gaps.append(float((ordered[:, top_k - 1] - ordered[:, top_k]).min()))

    for layer in model.model.layers:
        hooks.append(layer.mlp.gate.register_forward_hook(hook))
    reference_model.logits(model, ids)
    for h in hooks:
        h.remove()
    return min(gaps)


def layer_influence(model, ids, full):
    """Smallest change of the logits when one layer's mixer or second half is left out."""
    least = float("inf")
    for layer in model.model.layers:
        mixer = layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn
        for part in (mixer, layer.mlp):
            hook = part.register_forward_hook(
                lambda _m, _i, out: (out[0] * 0, *out[1:]) if isinstance(out, tuple) else out * 0)
            least = min(least, relative(reference_model.logits(model, ids), full))
            hook.remove()
    return least


@torch.no_grad()
def bf16_errors(folder, prompt, full, positions, draws=8):
    """How far rounding to BF16 moves the logits: over all of them together, those of all tokens or those at `positions`,
    which tests compare; and at the median one of these. The worst of some runs that differ by a last bit of the
    embedding: a routing choice that flips moves one position of a tiny model a lot, so one run says little of the
    sum, and where the flips are decides which of the two sums is larger. The median does not see them."""
    model = reference_model.load(folder, dtype=torch.bfloat16)
    weight = model.model.embed_tokens.weight
    exact, noise, worst, median = weight.float(), torch.Generator().manual_seed(1), 0.0, 0.0
    for draw in range(draws):
        shift = (torch.rand(exact.shape, generator=noise) - 0.5) * (0 if draw == 0 else 2**-7)
        weight.copy_(exact * (1 + shift))
        found = reference_model.logits(model, prompt)
        worst = max(worst, relative(found, full), relative(found[positions], full[positions]))
        rows = (found - full).norm(dim=-1) / full.norm(dim=-1)
        median = max(median, float(rows[positions].median()))
    return {"bf16": worst, "bf16_median": median}


def measure(spec, folder):
    """The golden tensors of a checkpoint, and how robust they are."""
    model = reference_model.load(folder)
    prompt = parity_models.prompt_ids(spec)
    full = reference_model.logits(model, prompt)
    tokens, rows = reference_model.greedy(model, prompt, STEPS)
    ids = np.concatenate([prompt, np.int32(tokens)])
    again = reference_model.logits(model, ids)  # everything in one pass: chunked delta rule, no cache
    best = rows.sort(dim=-1, descending=True).values
    positions = np.arange(len(prompt)) if spec.all_positions and folder.name == "bf16" else \
        np.append(np.arange(0, len(prompt), 8), len(prompt) - 1)
    changed = prompt.copy()
    changed[0] = (changed[0] + 1) % spec.special
    stats = {
        "margin": float(((best[:, 0] - best[:, 1]) / rows.abs().amax(-1)).min()),
        **({} if spec.dense else {"router_gap": router_gaps(model, ids, spec.top_k)}),
        "distinct": len(set(tokens)),
        "first_token": relative(reference_model.logits(model, changed)[-1], full[-1]),
        "layer": layer_influence(model, prompt, full),
        "noise": relative(rows, again[len(prompt) - 1:-1]),
        **bf16_errors(folder, prompt, full, positions),
    }
    if again[len(prompt) - 1:-1].argmax(-1).tolist() != tokens or max(tokens) >= spec.special:
        stats["distinct"] = 0
    golden = {"prompt_ids": torch.from_numpy(prompt), "greedy_ids": torch.tensor(tokens, dtype=torch.int32),
              "positions": torch.from_numpy(positions.astype(np.int32)), "logits": full[positions].contiguous(),
              "greedy_margin": (best[:, 0] - best[:, 1]).contiguous()}
    return golden, stats


def good(stats):
    return all(stats[k] <= v if k == "noise" else stats[k] >= v for k, v in LIMITS.items() if k in stats)


def check_with_own_class(spec, folder, golden):
    """The unquantised checkpoint through from_pretrained of the class its config names: same logits."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    name = parity_models.config(spec)["architectures"][0]
    model, info = getattr(transformers, name).from_pretrained(
        str(folder), dtype=torch.float32, attn_implementation="eager", experts_implementation="eager",
        output_loading_info=True)
    missing = [k for k in info["missing_keys"] if "visual" not in k]
    if missing or info["mismatched_keys"]:
        raise ValueError(f"{folder}: transformers misses {missing}, mismatched {info['mismatched_keys']}")
    error = relative(reference_model.logits(model.eval(), golden["prompt_ids"])[golden["positions"].long()],
                     golden["logits"])
    if error > 1e-6:
        raise ValueError(f"{folder}: {name}.from_pretrained differs by {error:.2e}")


def build(spec, out):
    """All formats of one model below out; returns the stats by format, or None at the first that is not good."""
    stats = {}
    for fmt in spec.formats:
        folder = out / spec.name / fmt
        parity_formats.write_checkpoint(spec, fmt, folder)
        golden, stats[fmt] = measure(spec, folder)
        print(f"{spec.name:13s} {fmt:15s} seed {spec.seed}  " +
              "  ".join(f"{k} {v:.2g}" for k, v in stats[fmt].items()), flush=True)
        if not good(stats[fmt]):
            return None
        if not parity_formats.RECIPES[fmt]:
            check_with_own_class(spec, folder, golden)
        save_file(golden, str(out / spec.name / f"{fmt}.golden.safetensors"))
    return stats


def make(spec, search):
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        stats = build(spec, scratch)
        while stats is None and search:
            shutil.rmtree(scratch / spec.name)
            spec.seed += 10
            stats = build(spec, scratch)
        if stats is None:
            raise SystemExit(f"{spec.name}: seed {spec.seed} fails the limits {LIMITS}; use --search")
        shutil.rmtree(OUT / spec.name, ignore_errors=True)
        shutil.copytree(scratch / spec.name, OUT / spec.name)
    return stats


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--only", nargs="*", help="names of models (default: all; the manifest needs all)")
    arguments.add_argument("--search", action="store_true", help="try further seeds until one passes")
    arguments = arguments.parse_args()
    torch.set_num_threads(1)  # matrices this small only lose by sharing
    quant_formats.self_check()
    OUT.mkdir(parents=True, exist_ok=True)
    manifest = []
    for spec in parity_models.SPECS:
        if arguments.only and spec.name not in arguments.only:
            continue
        stats = make(spec, arguments.search)
        manifest.append({"model": spec.name, "what": spec.what, "seed": spec.seed, "vocab": spec.vocab,
                         "formats": {f: {k: float(f"{v:.3g}") for k, v in s.items()} for f, s in stats.items()}})
    if not arguments.only:
        parity_formats.dump(OUT / "manifest.json", {"models": manifest, "limits": LIMITS})


if __name__ == "__main__":
    main()
