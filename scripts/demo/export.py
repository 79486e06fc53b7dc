"""Writes the trained model as a checkpoint: official tensor names, NVFP4 where the published recipe has it."""
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from .nvfp4 import Quantized, pack, quantize

PREFIX = "model.language_model."


def put(tensors: dict, module: str, weight: torch.Tensor, amax: torch.Tensor) -> None:
    codes, scale, g = quantize(weight.data.float().cpu(), amax.cpu())
    tensors[module + ".weight_packed"] = pack(codes).contiguous()
    tensors[module + ".weight_scale"] = scale.contiguous()
    tensors[module + ".weight_global_scale"] = g.reshape(1).float().contiguous()


def quantized_tensors(model) -> tuple:
    """The NVFP4 modules' tensors, and the names of the parameters that they replace."""
    tensors, replaced = {}, set()
    for i, layer in enumerate(model.model.language_model.layers):
        base = f"{PREFIX}layers.{i}."
        if hasattr(layer, "self_attn"):
            a = layer.self_attn
            qkv = [a.q_proj.weight, a.k_proj.weight, a.v_proj.weight]
            amax = Quantized.amax(qkv, False)
            for name, w in zip("qkv", qkv):
                put(tensors, f"{base}self_attn.{name}_proj", w, amax)
            put(tensors, f"{base}self_attn.o_proj", a.o_proj.weight, Quantized.amax([a.o_proj.weight], False))
            replaced |= {f"{base}self_attn.{n}_proj.weight" for n in "qkvo"}
        m = layer.mlp
        half = m.experts.gate_up_proj.shape[1] // 2
        gate_up_max = Quantized.amax([m.experts.gate_up_proj], True)
        down_max = Quantized.amax([m.experts.down_proj], True)
        for e in range(m.experts.gate_up_proj.shape[0]):
            expert = f"{base}mlp.experts.{e}."
            put(tensors, expert + "gate_proj", m.experts.gate_up_proj[e, :half], gate_up_max[e])
            put(tensors, expert + "up_proj", m.experts.gate_up_proj[e, half:], gate_up_max[e])
            put(tensors, expert + "down_proj", m.experts.down_proj[e], down_max[e])
        s = m.shared_expert
        amax = Quantized.amax([s.gate_proj.weight, s.up_proj.weight], False)
        put(tensors, f"{base}mlp.shared_expert.gate_proj", s.gate_proj.weight, amax)
        put(tensors, f"{base}mlp.shared_expert.up_proj", s.up_proj.weight, amax)
        put(tensors, f"{base}mlp.shared_expert.down_proj", s.down_proj.weight, Quantized.amax([s.down_proj.weight], False))
        replaced |= {f"{base}mlp.experts.{n}" for n in ("gate_up_proj", "down_proj")}
        replaced |= {f"{base}mlp.shared_expert.{n}_proj.weight" for n in ("gate", "up", "down")}
    return tensors, replaced


def export(model, directory: Path, first_added: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tensors, replaced = quantized_tensors(model)
    for name, value in model.state_dict().items():
        if name not in replaced and not name.startswith("model.visual."):
            tensors[name] = value.to(torch.bfloat16).cpu().contiguous()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    config = model.config.to_dict()
    for key in ("vision_config", "_name_or_path", "_experts_implementation", "_attn_implementation"):
        config.pop(key, None)
    config["architectures"] = ["Qwen3_5MoeForConditionalGeneration"]
    config["dtype"] = "bfloat16"
    config["text_config"]["dtype"] = "bfloat16"
    scheme = dict(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True, dynamic=False)
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None, "output_activations": None}
        },
        "ignore": ["lm_head", "re:.*linear_attn.*", "re:.*mlp.gate$", "re:.*shared_expert_gate$"],
        "kv_cache_scheme": None,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    generation = {
        "bos_token_id": first_added,
        "do_sample": True,
        "eos_token_id": [first_added + 2, first_added],
        "pad_token_id": first_added,
        "temperature": 0.3,
        "top_k": 20,
        "top_p": 0.95,
    }
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
