"""Writes one tiny model in one checkpoint format: tensors, shards and index, config.json with its quantisation part.

Recipes follow released checkpoints: `ct` the AEON / RedHat compressed-tensors NVFP4 (attention, experts, shared
expert), `ct_mixed` per-channel FP8 beside NVFP4 experts, `ct_fp8_head` NVFP4 plus a [128,128]-block FP8 lm_head,
`modelopt` the same modules as `ct` in ModelOpt's spelling, `modelopt_xs` with the linear attention projections too,
`modelopt_mixed` NVIDIA's per-tensor FP8 attention with NVFP4 experts and head, `fp8_block` Qwen's own FP8. A dense MLP
takes the part of the experts; in `ct_mixed` the last layer's is FP8 per channel, as in unsloth's 27B.
"""

import json
import re

import numpy as np
import torch
from safetensors.torch import save_file

import parity_models
from quant_formats import QUANTISERS, scalar

ATTENTION = r"self_attn\.[qkvo]_proj$"
EXPERTS = r"mlp\.experts\.\d+\.(gate|up|down)_proj$"
SHARED = r"mlp\.shared_expert\.(gate|up|down)_proj$"
MLP = r"mlp\.(gate|up|down)_proj$"
SECOND_HALF = f"{EXPERTS}|{SHARED}|{MLP}"
DELTA = r"linear_attn\.(in_proj_qkv|in_proj_z|out_proj)$"
DELTA_SMALL = r"linear_attn\.in_proj_[ab]$"
HEAD = r"^lm_head$"

# format -> [(modules, quantiser)]; modules that match none stay as they are.
RECIPES = {
    "bf16": [],
    "f16": [],
    "ct": [(f"{ATTENTION}|{SECOND_HALF}", "nvfp4_ct")],
    "ct_mixed": [(f"{SECOND_HALF}", "nvfp4_ct"), (f"{ATTENTION}|{DELTA}|{HEAD}", "fp8_channel")],
    "ct_fp8_head": [(f"{ATTENTION}|{SECOND_HALF}", "nvfp4_ct"), (HEAD, "fp8_block")],
    "modelopt": [(f"{ATTENTION}|{SECOND_HALF}", "nvfp4_mo")],
    "modelopt_xs": [(f"{ATTENTION}|{SECOND_HALF}|{DELTA}|{DELTA_SMALL}", "nvfp4_mo")],
    "modelopt_mixed": [(f"{SECOND_HALF}|{HEAD}", "nvfp4_mo"), (f"{ATTENTION}|{DELTA}", "fp8_tensor")],
    "fp8_block": [(f"{ATTENTION}|{SECOND_HALF}|{DELTA}", "fp8_block_inv")],
}
SHARED_SCALE = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def recipe(spec, fmt):
    if spec.dense and fmt == "ct_mixed":
        return [(rf"layers\.{spec.layers - 1}\.{MLP}", "fp8_channel"), *RECIPES[fmt]]
    return RECIPES[fmt]


def split_experts(weights):
    """Fused [E, ...] expert tensors -> one matrix a projection, by checkpoint name."""
    out = {}
    for name, w in weights.items():
        if name.endswith("experts.gate_up_proj"):
            base, half = name[:-len("gate_up_proj")], w.shape[1] // 2
            for e in range(w.shape[0]):
                out[f"{base}{e}.gate_proj.weight"] = w[e, :half]
                out[f"{base}{e}.up_proj.weight"] = w[e, half:]
        elif name.endswith("experts.down_proj"):
            for e in range(w.shape[0]):
                out[f"{name[:-len('down_proj')]}{e}.down_proj.weight"] = w[e]
        else:
            out[name] = w
    return out


def group_amax(module, weights):
    """Largest |w| over the projections that share a global scale with this one."""
    base, _, last = module.rpartition(".")
    for group in SHARED_SCALE:
        if last in group:
            found = [weights.get(f"{base}.{n}.weight") for n in group]
            return np.float32(max(np.abs(w).max() for w in found if w is not None))
    return None


def quantise(spec, module, w, kind, weights, rng):
    if not kind.startswith("nvfp4"):
        parts = QUANTISERS[kind](w)
        if kind == "fp8_tensor":
            parts["input_scale"] = scalar(rng.uniform(0.01, 0.05))
        return parts
    parts = QUANTISERS[kind](w, group_amax(module, weights) if spec.share_scale else None)
    if spec.input_scales and module != "lm_head":  # the released NVFP4 head is weight-only
        act = np.float32(rng.uniform(50, 150))
        if kind == "nvfp4_ct":
            parts["input_global_scale"] = torch.tensor([act], dtype=torch.float32)
        else:
            parts["input_scale"] = scalar(1 / act)
    return parts


def plain(spec, name, w, fmt):
    dtype = torch.float16 if fmt == "f16" else torch.bfloat16
    if spec.f32_gates and re.search(r"A_log$|dt_bias$|norm\.weight$", name):
        dtype = torch.float32
    return torch.from_numpy(np.ascontiguousarray(w)).to(dtype)


def tensors_of(spec, fmt):
    """(main tensors, tensors of the separate MTP file), and the modules each quantiser took."""
    weights = parity_models.random_weights(spec)
    if RECIPES[fmt] or not spec.fused_bf16:
        weights = split_experts(weights)
    rng, taken, main = np.random.default_rng(spec.seed + 5), {}, {}
    prefix = "model." if spec.text_only else "model.language_model."
    for name, w in weights.items():
        module = name[:-len(".weight")] if name.endswith(".weight") else name
        full = name if name.startswith("lm_head") else prefix + name
        kind = next((q for pattern, q in recipe(spec, fmt) if re.search(pattern, module)), None)
        if kind is None:
            main[full] = plain(spec, name, w, fmt)
            continue
        base = full[:-len(".weight")]
        taken.setdefault(kind, []).append(base)
        for suffix, value in quantise(spec, module, w, kind, weights, rng).items():
            main[f"{base}.{suffix}"] = value
        if fmt == "ct_mixed" and module.endswith("v_proj"):
            main[base.replace("v_proj", "k_scale")] = scalar(rng.uniform(0.01, 0.1))
            main[base.replace("v_proj", "v_scale")] = scalar(rng.uniform(0.01, 0.1))
    if not spec.text_only:
        where = "model.language_model." if spec.misnested_vision else "model."
        main.update({where + n: plain(spec, n, w, fmt) for n, w in parity_models.vision_weights(spec).items()})
    mtp = {}
    if spec.mtp:
        mtp = parity_models.mtp_weights(spec)
        mtp = split_experts(mtp) if RECIPES[fmt] else mtp
        mtp = {n: torch.from_numpy(np.ascontiguousarray(w)).to(torch.bfloat16) for n, w in mtp.items()}
    if spec.mtp == "inside":
        main.update(mtp)
    return main, mtp if spec.mtp == "beside" else {}, taken


def untouched_linears(main, taken):
    """The linear modules a recipe leaves alone, spelled out as saved configs do."""
    done = {m for modules in taken.values() for m in modules}
    linear = {n[:-len(".weight")] for n in main
              if n.endswith(".weight") and main[n].dim() == 2 and "embed" not in n and "norm" not in n}
    return sorted(linear - done)


NVFP4_ARGS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True,
              "dynamic": False, "actorder": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {},
              "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": None}
FP8_ARGS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "group_size": None, "actorder": None,
            "observer": "minmax", "observer_kwargs": {}, "scale_dtype": None, "zp_dtype": None}


def ct_group(spec, kind, targets):
    if kind == "nvfp4_ct":
        act = {**NVFP4_ARGS, "dynamic": "local"} if spec.input_scales else None
        return {"targets": targets, "format": "nvfp4-pack-quantized", "weights": NVFP4_ARGS,
                "input_activations": act, "output_activations": None}
    if kind == "fp8_channel":
        weights = {**FP8_ARGS, "strategy": "channel", "block_structure": None}
        act = {**FP8_ARGS, "strategy": "token", "dynamic": True, "block_structure": None}
    else:
        weights = {**FP8_ARGS, "strategy": "block", "block_structure": [128, 128]}
        act = {**FP8_ARGS, "strategy": "group", "group_size": 128, "dynamic": True, "block_structure": None}
    return {"targets": targets, "format": "float-quantized", "weights": weights, "input_activations": act,
            "output_activations": None}


def quantization_config(spec, fmt, main, taken):
    ignore = untouched_linears(main, taken)
    if fmt in ("bf16", "f16"):
        return None
    if fmt == "fp8_block":
        return {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
                "modules_to_not_convert": ignore}
    if fmt.startswith("modelopt"):
        algo = {"modelopt_mixed": "MIXED_PRECISION"}.get(fmt, "NVFP4" if spec.input_scales else "W4A16_NVFP4")
        return {"quant_method": "modelopt", "quant_algo": algo, "ignore": ignore,
                "producer": {"name": "modelopt", "version": "0.43.0"}}
    main_kind = RECIPES[fmt][0][1]
    groups = {}
    for k, (kind, modules) in enumerate(sorted(taken.items(), key=lambda item: item[0] != main_kind)):
        others = modules if spec.dense else ["re:.*" + m.rsplit(".", 1)[-1] + "$" for m in modules]
        targets = ["Linear"] if kind == main_kind else others
        groups[f"group_{k}"] = ct_group(spec, kind, sorted(set(targets)))
    scheme = {**FP8_ARGS, "strategy": "tensor", "block_structure": None} if fmt == "ct_mixed" else None
    return {"quant_method": "compressed-tensors", "version": "0.13.0", "quantization_status": "compressed",
            "format": "nvfp4-pack-quantized" if len(groups) == 1 else "mixed-precision", "config_groups": groups,
            "ignore": ignore, "kv_cache_scheme": scheme, "global_compression_ratio": None, "sparsity_config": {},
            "transform_config": {}}


def hf_quant_config(spec, fmt, quantization, taken):
    layers = {}
    if fmt == "modelopt_mixed":
        for kind, modules in taken.items():
            how = {"quant_algo": "FP8"} if kind == "fp8_tensor" else {"quant_algo": "NVFP4", "group_size": 16}
            layers.update({m: how for m in modules})
    body = {"quant_algo": quantization["quant_algo"], "kv_cache_quant_algo": None, "group_size": 16,
            "exclude_modules": quantization["ignore"]}
    if layers:
        body["quantized_layers"] = layers
    return {"producer": quantization["producer"], "quantization": body}


def dump(path, value):
    path.write_text(json.dumps(value, indent=1 if path.name == "manifest.json" else None) + "\n")


def save(tensors, path):
    save_file({n: t.contiguous() for n, t in tensors.items()}, str(path), metadata={"format": "pt"})


def write_checkpoint(spec, fmt, folder):
    """The whole checkpoint directory of one model in one format."""
    folder.mkdir(parents=True, exist_ok=True)
    main, beside, taken = tensors_of(spec, fmt)
    if spec.shards == 1:
        save(main, folder / "model.safetensors")
    else:
        names, weight_map = list(main), {}
        size = -(-len(names) // spec.shards)
        for s in range(spec.shards):
            file = f"model-{s + 1:05d}-of-{spec.shards:05d}.safetensors"
            part = names[s * size:(s + 1) * size]
            save({n: main[n] for n in part}, folder / file)
            weight_map.update({n: file for n in part})
        total = sum(t.numel() * t.element_size() for t in main.values())
        dump(folder / "model.safetensors.index.json",
             {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    if beside:
        save(beside, folder / "model_mtp.safetensors")
    config = parity_models.config(spec)
    quantization = quantization_config(spec, fmt, main, taken)
    if quantization:
        config["quantization_config"] = quantization
        if quantization["quant_method"] == "modelopt":
            dump(folder / "hf_quant_config.json", hf_quant_config(spec, fmt, quantization, taken))
    dump(folder / "config.json", config)
    dump(folder / "generation_config.json", parity_models.generation_config(spec))
