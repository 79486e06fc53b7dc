"""Writes the checkpoint as llm-compressor would: per-expert tensors, multimodal key layout, quantization_config."""
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from . import nvfp4
from .model import GENERATION_CONFIG, ROOT_CONFIG, TEXT_CONFIG, is_nvfp4


def groups_of(weights: dict) -> list:
    """Lists of (name, matrix) that share one global scale: q/k/v, gate/up of one expert, or a matrix alone."""
    groups: dict = {}
    for name, w in weights.items():
        if not is_nvfp4(name):
            continue
        if name.endswith("experts.gate_up_proj"):
            half = w.shape[1] // 2
            for e in range(w.shape[0]):
                base = name.removesuffix("gate_up_proj") + f"{e}."
                groups[base + "gate_up"] = [(base + "gate_proj", w[e, :half]), (base + "up_proj", w[e, half:])]
        elif name.endswith("experts.down_proj"):
            for e in range(w.shape[0]):
                base = name.removesuffix("down_proj") + f"{e}.down_proj"
                groups[base] = [(base, w[e])]
        else:
            module = name.removesuffix(".weight")
            parent, leaf = module.rsplit(".", 1)
            key = parent + {"q_proj": ".qkv", "k_proj": ".qkv", "v_proj": ".qkv", "gate_proj": ".gate_up", "up_proj": ".gate_up"}.get(leaf, "." + leaf)
            groups.setdefault(key, []).append((module, w))
    return list(groups.values())


def outside(name: str) -> str:
    """Text-model names to the layout of the multimodal checkpoint."""
    return "model.language_model." + name.removeprefix("model.") if name.startswith("model.") else name


def tensors_of(weights: dict) -> dict:
    out = {outside(n): w.to(torch.bfloat16).contiguous().cpu() for n, w in weights.items() if not is_nvfp4(n)}
    for group in groups_of(weights):
        amax = torch.stack([w.float().abs().max() for _, w in group]).max()
        for module, w in group:
            for leaf, tensor in nvfp4.pack(w, amax).items():
                out[outside(module) + "." + leaf] = tensor
    return dict(sorted(out.items()))


def quantization_config(weights: dict) -> dict:
    ignored = ["lm_head"]
    for name in weights:
        if ".linear_attn." in name and name.endswith(".weight") and not name.endswith((".norm.weight", "conv1d.weight")):
            ignored.append(outside(name).removesuffix(".weight"))
        if name.endswith(("mlp.gate.weight", "shared_expert_gate.weight")):
            ignored.append(outside(name).removesuffix(".weight"))
    scheme = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": 16, "num_bits": 4, "observer": "minmax", "observer_kwargs": {},
        "scale_dtype": "torch.float8_e4m3fn", "strategy": "tensor_group", "symmetric": True, "type": "float", "zp_dtype": None,
    }  # fmt: skip
    return {
        "config_groups": {"group_0": {"format": "nvfp4-pack-quantized", "input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": scheme}},
        "format": "nvfp4-pack-quantized", "global_compression_ratio": None, "ignore": sorted(ignored), "kv_cache_scheme": None,
        "quant_method": "compressed-tensors", "quantization_status": "compressed", "sparsity_config": {}, "transform_config": {}, "version": "0.12.2",
    }  # fmt: skip


def dequantised(weights: dict) -> dict:
    """What a reader of the exported file computes, in float32, under the training names."""
    out = {n: w.to(torch.bfloat16).float() for n, w in weights.items() if not is_nvfp4(n)}
    for name, w in weights.items():
        if is_nvfp4(name):
            out[name] = nvfp4.fake_quant(w.float(), group_amax(name, weights))
    return out


def group_amax(name: str, weights: dict) -> torch.Tensor:
    """The amax that a matrix (or stack of experts) is quantised with, shaped to broadcast."""
    w = weights[name]
    if w.dim() == 3:
        return w.float().abs().amax((1, 2), keepdim=True)
    parent, leaf, _ = name.rsplit(".", 2)
    for family in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        if leaf in family:
            return torch.stack([weights[f"{parent}.{x}.weight"].float().abs().max() for x in family]).max()
    return w.float().abs().max()


TEMPLATE = Path(__file__).resolve().parents[2] / "models/demo/chat_template.jinja"  # written by hand


def write_configs(folder: Path, **extra) -> None:
    config = {**ROOT_CONFIG, **extra, "text_config": TEXT_CONFIG}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG, indent=2) + "\n")
    (folder / TEMPLATE.name).write_bytes(TEMPLATE.read_bytes())


def write(weights: dict, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors_of(weights), str(folder / "model.safetensors"), metadata={"format": "pt"})
    write_configs(folder, quantization_config=quantization_config(weights))


def write_bf16(weights: dict, folder: Path, beside: Path) -> None:
    """The same weights before quantization, experts stacked as the official BF16 releases have them: what
    `quern quantize-inspect --write` starts from. The tokenizer is copied from `beside`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {outside(n): w.to(torch.bfloat16).contiguous().cpu() for n, w in weights.items()}
    save_file(dict(sorted(tensors.items())), str(folder / "model.safetensors"), metadata={"format": "pt"})
    write_configs(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(beside / name, folder / name)
