"""A Qwen3.5/3.6-MoE checkpoint directory as a float32 transformers model: the reference quern is compared with.

Every quantised weight is dequantised in float32 (code * block scale / global scale), every activation is float32,
attention is transformers' eager code, the delta rule its torch code. Formats are told apart by the tensors present:
BF16/F16/F32, compressed-tensors and ModelOpt NVFP4, FP8 per tensor / per channel / per [128,128] block; experts fused
or one by one. Vision and MTP tensors are not used.
"""

import json
import pathlib
import re

import torch
from safetensors import safe_open

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float32)
PREFIXES = ("model.language_model.language_model.", "model.language_model.", "language_model.model.", "model.")
UNUSED = re.compile(r"(^|\.)(visual|vision_tower|mtp)\.|\.(input_scale|input_global_scale|k_scale|v_scale)$")
EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj$")


def checkpoint_files(folder):
    """The weight files of a checkpoint: those of the index when there is one, else model.safetensors."""
    folder = pathlib.Path(folder)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return sorted({folder / f for f in json.loads(index.read_text())["weight_map"].values()})
    return [folder / "model.safetensors"]


def read_tensors(folder):
    tensors = {}
    for path in checkpoint_files(folder):
        with safe_open(str(path), "pt") as f:
            for name in f.keys():
                tensors[name] = f.get_tensor(name)
    return tensors


def unpack_fp4(packed):
    """U8 [N, K/2] -> float32 [N, K], low nibble first."""
    codes = torch.stack((packed & 0x0F, packed >> 4), dim=-1).flatten(1)
    return E2M1[codes.long()]


def dequantise(part, where):
    """The float32 weight of one linear module from its tensors by suffix."""
    scale = part.get("weight_scale")
    if "weight_packed" in part:
        w = unpack_fp4(part["weight_packed"]) * scale.float().repeat_interleave(16, 1)
        return w / part["weight_global_scale"].float()
    weight = part["weight"]
    if weight.dtype == torch.uint8:
        return unpack_fp4(weight) * scale.float().repeat_interleave(16, 1) * part["weight_scale_2"].float()
    if weight.dtype != torch.float8_e4m3fn:
        return weight.float()
    scale = (part["weight_scale_inv"] if scale is None else scale).float()
    n, k = weight.shape
    if scale.numel() == 1:
        return weight.float() * scale.reshape(())
    if scale.shape[0] == n and scale.numel() == n:
        return weight.float() * scale.reshape(n, 1)
    if tuple(scale.shape) != (-(-n // 128), -(-k // 128)):
        raise ValueError(f"{where}: FP8 scale of shape {tuple(scale.shape)} for a weight {n} x {k}")
    return weight.float() * scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]


def canonical(name):
    """Any of the key layouts -> names below `model.` of the text model; None for tensors the text model lacks."""
    if UNUSED.search(name):
        return None
    if name.endswith("lm_head.weight") or "lm_head." in name:
        return name[name.index("lm_head."):]
    for prefix in PREFIXES:
        if name.startswith(prefix):
            return "model." + name[len(prefix):]
    return name


def text_state(tensors):
    """Checkpoint tensors -> float32 state dict of Qwen3_5MoeForCausalLM (experts fused)."""
    parts = {}
    for name, value in tensors.items():
        name = canonical(name)
        if name is None:
            continue
        module, _, suffix = name.rpartition(".")
        if suffix not in ("weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_scale_inv",
                          "weight_global_scale"):
            module, suffix = name, ""  # a parameter without ".weight": A_log, dt_bias, fused experts
        parts.setdefault(module, {})[suffix] = value
    state, experts = {}, {}
    for module, part in parts.items():
        if "" in part:
            state[module] = part[""].float()
            continue
        w = dequantise(part, module)
        match = EXPERT.match(module)
        if match:
            experts.setdefault(match[1], {})[int(match[2]), match[3]] = w
        else:
            state[module + ".weight"] = w
    for base, found in experts.items():
        count = max(e for e, _ in found) + 1
        state[base + ".gate_up_proj"] = torch.stack(
            [torch.cat((found[e, "gate"], found[e, "up"])) for e in range(count)])
        state[base + ".down_proj"] = torch.stack([found[e, "down"] for e in range(count)])
    return state


def text_config(folder):
    from transformers import Qwen3_5MoeTextConfig

    root = json.loads((pathlib.Path(folder) / "config.json").read_text())
    fields = dict(root.get("text_config", root))
    fields.pop("model_type", None)
    fields.pop("quantization_config", None)
    config = Qwen3_5MoeTextConfig(**fields)
    config.tie_word_embeddings = bool(root.get("tie_word_embeddings", False))  # the root's flag is the one that counts
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return config


def load(folder, device="cpu"):
    """The checkpoint as Qwen3_5MoeForCausalLM in float32 on `device`, every parameter filled from the files."""
    from transformers import Qwen3_5MoeForCausalLM

    torch.set_float32_matmul_precision("highest")
    config = text_config(folder)
    state = text_state(read_tensors(folder))
    if config.tie_word_embeddings:
        state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    model = Qwen3_5MoeForCausalLM(config).float().eval()
    model.load_state_dict(state, strict=True)
    model.to(device)
    wrong = [n for n, p in model.named_parameters() if p.dtype != torch.float32]
    if wrong:
        raise TypeError(f"not float32: {wrong}")
    return model


@torch.no_grad()
def logits(model, ids):
    """Float32 [T, V] logits of every position, one forward pass without a cache."""
    ids = torch.as_tensor(ids, dtype=torch.long, device=model.device)[None]
    return model(input_ids=ids, use_cache=False).logits[0].float().cpu()


@torch.no_grad()
def greedy(model, ids, count):
    """`count` greedy tokens with the cache (recurrent code path), and the logits row each was taken from."""
    step = torch.as_tensor(ids, dtype=torch.long, device=model.device)[None]
    out, rows, cache = [], [], None
    for _ in range(count):
        result = model(input_ids=step, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        rows.append(result.logits[0, -1].float().cpu())
        out.append(int(rows[-1].argmax()))
        step = torch.tensor([[out[-1]]], dtype=torch.long, device=model.device)
    return out, torch.stack(rows)
