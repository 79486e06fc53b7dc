"""The demo's vision tower: Qwen3.6's architecture, narrow and shallow, in the form that training wants: many pictures of one size.

Formulas: spec of the family's tower as HF transformers has it (Qwen3_5MoeVisionModel); `reference` builds that one with the same
weights, and scripts/train_demo_vision.py --check compares the two."""
import json
import math
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from .model import ROOT_CONFIG

PATCH, MERGE, SIDE = 16, 2, 12
CONFIG = {
    "model_type": "qwen3_5_moe", "depth": 3, "hidden_size": 128, "num_heads": 4, "intermediate_size": 320, "patch_size": PATCH,
    "temporal_patch_size": 2, "spatial_merge_size": MERGE, "in_channels": 3, "num_position_embeddings": SIDE * SIDE, "out_hidden_size": 256,
    "hidden_act": "gelu_pytorch_tanh", "deepstack_visual_indexes": [], "initializer_range": 0.02,
}  # fmt: skip
PREPROCESSOR = {
    "size": {"shortest_edge": 16384, "longest_edge": 36864}, "patch_size": PATCH, "temporal_patch_size": 2, "merge_size": MERGE,
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_processor_type": "Qwen2VLImageProcessorFast",
}  # fmt: skip
FILE = "model_vision.safetensors"


def patches_of(pictures: torch.Tensor) -> torch.Tensor:
    """[B, H, W, 3] U8 to [B, N, 1536] F32, in the order of tokens; both frames are the picture."""
    b, height, width, _ = pictures.shape
    x = (pictures.float() - 127.5) / 127.5
    x = x.view(b, height // 32, 2, PATCH, width // 32, 2, PATCH, 3).permute(0, 1, 4, 2, 5, 7, 3, 6)
    x = x.unsqueeze(6).expand(-1, -1, -1, -1, -1, -1, 2, -1, -1)
    return x.reshape(b, height // PATCH * (width // PATCH), 3 * 2 * PATCH * PATCH)


def places(rows: int, columns: int, device) -> tuple:
    """Row and column of each patch, in the order of tokens."""
    grid = torch.stack(torch.meshgrid(torch.arange(rows, device=device), torch.arange(columns, device=device), indexing="ij"), -1)
    order = grid.view(rows // 2, 2, columns // 2, 2, 2).permute(0, 2, 1, 3, 4).reshape(-1, 2)
    return order[:, 0], order[:, 1]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        d, f = CONFIG["hidden_size"], CONFIG["intermediate_size"]
        self.norm1, self.norm2 = nn.LayerNorm(d, eps=1e-6), nn.LayerNorm(d, eps=1e-6)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(d, 3 * d), "proj": nn.Linear(d, d)})
        self.mlp = nn.ModuleDict({"linear_fc1": nn.Linear(d, f), "linear_fc2": nn.Linear(f, d)})

    def forward(self, x, cos, sin):
        q, k, v = self.attn["qkv"](self.norm1(x)).unflatten(-1, (3, CONFIG["num_heads"], -1)).permute(2, 0, 3, 1, 4)

        def turned(t):
            a, b = t.float().chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(v.dtype)

        y = F.scaled_dot_product_attention(turned(q), turned(k), v).transpose(1, 2).flatten(2)
        x = x + self.attn["proj"](y)
        y = F.gelu(self.mlp["linear_fc1"](self.norm2(x)), approximate="tanh")
        return x + self.mlp["linear_fc2"](y)


class Tower(nn.Module):
    """Parameters by the names of the exported file, without their prefix."""

    def __init__(self, scale: float):
        super().__init__()
        d, out = CONFIG["hidden_size"], CONFIG["out_hidden_size"]
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv3d(3, d, (2, PATCH, PATCH), (2, PATCH, PATCH))})
        self.pos_embed = nn.Embedding(SIDE * SIDE, d)
        self.blocks = nn.ModuleList(Block() for _ in range(CONFIG["depth"]))
        self.merger = nn.ModuleDict({"norm": nn.LayerNorm(d, eps=1e-6), "linear_fc1": nn.Linear(4 * d, 4 * d), "linear_fc2": nn.Linear(4 * d, out)})
        nn.init.normal_(self.pos_embed.weight, std=0.3)
        # Its rows begin as large as those of the embedding.
        nn.init.normal_(self.merger["linear_fc2"].weight, std=scale / math.sqrt(d))

    def positions(self, rows, columns):
        n, device = SIDE - 1, self.pos_embed.weight.device
        r, c = places(rows, columns, device)
        y, x = r.float() * n / max(rows - 1, 1), c.float() * n / max(columns - 1, 1)
        y0, x0 = y.floor().long(), x.floor().long()
        y1, x1, dy, dx = (y0 + 1).clamp(max=n), (x0 + 1).clamp(max=n), (y - y0)[:, None], (x - x0)[:, None]
        t = self.pos_embed.weight
        return ((1 - dy) * ((1 - dx) * t[SIDE * y0 + x0] + dx * t[SIDE * y0 + x1])
                + dy * ((1 - dx) * t[SIDE * y1 + x0] + dx * t[SIDE * y1 + x1]))

    def forward(self, pictures):
        """[B, H, W, 3] U8 to [B, tokens, out]."""
        rows, columns = pictures.shape[1] // PATCH, pictures.shape[2] // PATCH
        kernel = self.patch_embed["proj"]
        x = F.linear(patches_of(pictures), kernel.weight.flatten(1), kernel.bias) + self.positions(rows, columns)
        r, c = places(rows, columns, x.device)
        quarter = CONFIG["hidden_size"] // CONFIG["num_heads"] // 4
        inverse = 10000.0 ** (-torch.arange(quarter, device=x.device) / quarter)
        angle = torch.cat((r[:, None] * inverse, c[:, None] * inverse), -1)
        for block in self.blocks:
            x = block(x, angle.cos(), angle.sin())
        x = self.merger["norm"](x).unflatten(1, (-1, 4)).flatten(2)
        return self.merger["linear_fc2"](F.gelu(self.merger["linear_fc1"](x)))


def rounded(tower: Tower) -> dict:
    return {n: p.detach().to(torch.bfloat16).cpu().contiguous() for n, p in tower.state_dict().items()}


def reference(weights: dict):
    """transformers' own tower with these weights, in float32."""
    from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeVisionConfig
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeVisionModel

    config = Qwen3_5MoeVisionConfig(**{k: v for k, v in CONFIG.items() if k != "model_type"})
    config._attn_implementation = "eager"
    model = Qwen3_5MoeVisionModel(config).float().eval()
    model.load_state_dict({n: w.float() for n, w in weights.items()}, strict=True)
    return model


def write(tower: Tower, source: Path, folder: Path) -> float:
    """The demo with its tower: the text model's file as it is, the tower in a file of its own. Returns the tower's megabytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and file.resolve() != (folder / file.name).resolve():
            shutil.copyfile(file, folder / file.name)
    for name in ("mtp", "dflash"):
        if (source / name).is_dir() and source.resolve() != folder.resolve():
            shutil.copytree(source / name, folder / name, dirs_exist_ok=True)
    weights = {"model.visual." + n: w for n, w in rounded(tower).items()}
    save_file(weights, str(folder / FILE), metadata={"format": "pt"})
    (folder / FILE).chmod(0o644)
    text = load_file(str(folder / "model.safetensors"))
    index = {**{n: "model.safetensors" for n in text}, **{n: FILE for n in weights}}
    size = sum(w.numel() * w.element_size() for w in [*text.values(), *weights.values()])
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": dict(sorted(index.items()))}, separators=(",", ":")) + "\n")
    config = json.loads((folder / "config.json").read_text())
    config = {**config, **{k: ROOT_CONFIG[k] for k in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")},
              "language_model_only": False, "vision_config": CONFIG}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR, indent=2) + "\n")
    return (folder / FILE).stat().st_size / 1e6
