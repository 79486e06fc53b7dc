"""A Qwen3.5/3.6 checkpoint directory, MoE or dense, as a transformers model: the reference quern is compared with.

Every quantised weight is dequantised in float32 (code * block scale / global scale) and rounded to the type that is
asked for, float32 unless said; activations have that type. Attention is transformers' eager code, the delta rule its
torch code. Formats are told apart by the tensors present: BF16/F16/F32, compressed-tensors and ModelOpt NVFP4, FP8 per
tensor / per channel / per [128,128] block; experts fused or one by one. Vision and MTP tensors are not used. Weights
are read one module at a time, on the device: the 35B model fits a card that holds it once.
"""

import json
import pathlib
import re

import torch
from safetensors import safe_open

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float32)
PREFIXES = ("model.language_model.language_model.", "model.language_model.", "language_model.model.", "model.")
UNUSED = re.compile(r"(^|\.)(visual|vision_tower|mtp)\.|\.(input_scale|input_global_scale|k_scale|v_scale)$")


def checkpoint_files(folder):
    """The weight files of a checkpoint: those of the index when there is one, else model.safetensors."""
    folder = pathlib.Path(folder)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return sorted({folder / f for f in json.loads(index.read_text())["weight_map"].values()})
    return [folder / "model.safetensors"]


def unpack_fp4(packed):
    """U8 [N, K/2] -> float32 [N, K], low nibble first."""
    codes = torch.stack((packed & 0x0F, packed >> 4), dim=-1).flatten(1)
    return E2M1.to(packed.device)[codes.long()]


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


class Source:
    """The linear modules and parameters of the text model in a checkpoint's files, dequantised when asked for."""

    SUFFIXES = ("weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_scale_inv", "weight_global_scale")

    def __init__(self, folder, device):
        self.parts, self.taken = {}, set()  # module -> suffix -> (file, name in it); "" for a bare parameter
        for path in checkpoint_files(folder):
            file = safe_open(str(path), "pt", device=str(device))
            for name in file.keys():
                official = canonical(name)
                if official is None:
                    continue
                module, _, suffix = official.rpartition(".")
                if suffix not in self.SUFFIXES:
                    module, suffix = official, ""  # A_log, dt_bias, fused experts
                self.parts.setdefault(module, {})[suffix] = (file, name)

    def weight(self, module):
        """Float32; a parameter without ".weight" by its own name."""
        self.taken.add(module)
        part = {suffix: file.get_tensor(name) for suffix, (file, name) in self.parts[module].items()}
        return part[""].float() if "" in part else dequantise(part, module)

    def experts(self, name, out):
        """Fills a fused [E, ...] parameter from matrices one by one; gate above up."""
        base, _, kind = name.rpartition(".")
        for e in range(len(out)):
            if kind == "down_proj":
                out[e].copy_(self.weight(f"{base}.{e}.down_proj"))
            else:
                for half, which in zip(out[e].chunk(2), ("gate_proj", "up_proj")):
                    half.copy_(self.weight(f"{base}.{e}.{which}"))

    @torch.no_grad()
    def fill(self, model):
        """Every parameter from the files, and nothing of the files left over."""
        for name, parameter in model.named_parameters():
            module = name.removesuffix(".weight")
            if module in self.parts:
                w = self.weight(module)
                if w.shape != parameter.shape:
                    raise ValueError(f"{name}: the file has {tuple(w.shape)}, the model {tuple(parameter.shape)}")
                parameter.copy_(w)
            elif name == "lm_head.weight" and model.config.tie_word_embeddings:
                parameter.copy_(self.weight("model.embed_tokens"))
            elif re.search(r"\.mlp\.experts\.(gate_up|down)_proj$", name):
                self.experts(name, parameter)
            else:
                raise KeyError(f"{name}: not in the checkpoint")
        left = sorted(set(self.parts) - self.taken)
        if left:
            raise ValueError(f"{len(left)} modules of the checkpoint are not in the model, first {left[0]}")


def text_config(folder):
    from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig

    root = json.loads((pathlib.Path(folder) / "config.json").read_text())
    fields = dict(root.get("text_config", root))
    kind = fields.pop("model_type", None) or root["model_type"]
    fields.pop("quantization_config", None)
    config = (Qwen3_5MoeTextConfig if kind.startswith("qwen3_5_moe") else Qwen3_5TextConfig)(**fields)
    config.tie_word_embeddings = bool(root.get("tie_word_embeddings", False))  # the root's flag is the one that counts
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return config


def model_class(config):
    from transformers import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM

    return Qwen3_5MoeForCausalLM if config.model_type.startswith("qwen3_5_moe") else Qwen3_5ForCausalLM


def load(folder, device="cpu", dtype=torch.float32):
    """The checkpoint as the causal language model of its family on `device`, every parameter of `dtype` and filled from
    the files."""
    torch.set_float32_matmul_precision("highest")
    config = text_config(folder)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = model_class(config)(config).eval()
    finally:
        torch.set_default_dtype(before)
    Source(folder, device).fill(model)
    wrong = [n for n, p in model.named_parameters() if p.dtype != dtype]
    if wrong:
        raise TypeError(f"not {dtype}: {wrong}")
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
