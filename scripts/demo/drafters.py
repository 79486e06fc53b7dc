"""Drafters of the demo checkpoint: a layer for multi-token prediction and a DFlash drafter, trained beside the frozen model.

Both learn what the model itself says: the layer the model's best token after the next one, the drafter the tokens of whole
blocks. Formulas: scripts/mtp_reference.py and scripts/dflash_reference.py hold them in float64."""
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from . import nvfp4
from .export import groups_of
from .model import TEXT_CONFIG, build, is_nvfp4
from .optim import Muon
from .tokenizer import ADDRESSABLE, IDS, ROWS

BLOCK, WINDOW, TAPS = 8, 128, [1, 4, 6]
DFLASH_CONFIG = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_act": "silu", "attention_bias": False, "hidden_size": 256,
    "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW, "use_sliding_window": True, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000, "rope_type": "default"}, "max_position_embeddings": 4096, "vocab_size": ROWS,
    "num_target_layers": 8, "tie_word_embeddings": False, "dtype": "bfloat16",
    "dflash_config": {"block_size": BLOCK, "causal": False, "mask_token_id": IDS["<|fim_pad|>"], "target_layer_ids": TAPS},
}  # fmt: skip


def unpacked(folder: Path) -> dict:
    """The exported demo under the names that it was trained with, in float32, as a reader computes it."""
    t, grid = load_file(str(folder / "model.safetensors")), torch.tensor(nvfp4.GRID)

    def matrix(module: str) -> torch.Tensor:
        codes = t[module + ".weight_packed"].long()
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
        w = grid[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
        return w * t[module + ".weight_scale"].float().repeat_interleave(16, 1) / t[module + ".weight_global_scale"]

    def inside(name: str) -> str:
        return name.replace("model.language_model.", "model.")

    out = {inside(n): w.float() for n, w in t.items() if n.endswith(".weight") or w.dtype not in (torch.uint8, torch.float8_e4m3fn) and "weight_" not in n}
    modules = sorted(n.removesuffix(".weight_packed") for n in t if n.endswith(".weight_packed"))
    for m in modules:
        if ".experts." not in m:
            out[inside(m) + ".weight"] = matrix(m)
    for i in range(TEXT_CONFIG["num_hidden_layers"]):
        p = f"model.language_model.layers.{i}.mlp.experts."
        experts = range(TEXT_CONFIG["num_experts"])
        out[inside(p) + "gate_up_proj"] = torch.stack([torch.cat((matrix(f"{p}{e}.gate_proj"), matrix(f"{p}{e}.up_proj"))) for e in experts])
        out[inside(p) + "down_proj"] = torch.stack([matrix(f"{p}{e}.down_proj") for e in experts])
    return out


class Frozen:
    """The demo model, of which only outputs are wanted: bfloat16, without gradients."""

    def __init__(self, folder: Path, device: str):
        self.model = build().to(device)
        self.model.load_state_dict({n: w.to(device) for n, w in unpacked(folder).items()})
        self.model.to(torch.bfloat16 if device == "cuda" else torch.float32).eval().requires_grad_(False)
        if device == "cuda":
            self.model.set_experts_implementation("grouped_mm")
        self.taps: dict = {}
        for i in TAPS:
            self.model.model.layers[i].register_forward_hook(lambda _m, _i, out, i=i: self.taps.__setitem__(i, out[0] if isinstance(out, tuple) else out))
        self.embedding, self.head = self.model.model.embed_tokens.weight, self.model.lm_head.weight

    @torch.no_grad()
    def __call__(self, ids: torch.Tensor):
        """(hidden after the final norm, taps side by side, the model's best ids), a row each."""
        hidden = self.model.model(ids, use_cache=False).last_hidden_state
        logits = hidden @ self.head.T
        logits[..., ADDRESSABLE:] = -torch.inf
        return hidden, torch.cat([self.taps[i] for i in TAPS], -1), logits.argmax(-1)


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def rotated(x: torch.Tensor, positions: torch.Tensor, dims: int, theta: float) -> torch.Tensor:
    """x [B, heads, T, d]; positions [B, T] or [T]."""
    angle = positions[..., None].float() * theta ** (-torch.arange(0, dims, 2, device=x.device) / dims)
    cos, sin = (f(angle).unsqueeze(-3) for f in (torch.cos, torch.sin))
    a, b = x[..., : dims // 2].float(), x[..., dims // 2 : dims].float()
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., dims:].float()), -1)


def heads(x: torch.Tensor, size: int) -> torch.Tensor:
    return x.unflatten(-1, (-1, size)).transpose(1, 2)


def attended(q, k, v, **how) -> torch.Tensor:
    kind = torch.bfloat16 if q.is_cuda else torch.float32
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return F.scaled_dot_product_attention(q.to(kind), k.to(kind), v.to(kind), **how).transpose(1, 2).flatten(2)


class Drafter(nn.Module):
    """Parameters by the names of the exported file."""

    def __init__(self, shapes: dict):
        super().__init__()
        self.order = list(shapes)
        self.list = nn.ParameterList(
            [nn.Parameter(torch.full(s, 0.0 if self.shifted else 1.0) if len(s) == 1 else torch.randn(s) / math.sqrt(s[-1])) for s in shapes.values()])
        self.working: dict = {}

    def named(self) -> dict:
        return dict(zip(self.order, self.list))

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.working[name]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        w = self[name + ".weight"]
        return x.to(w.dtype) @ w.T

    def load_working(self, quantised: bool, device: str) -> None:
        """Matrices that the pass reads: bfloat16, or rounded to NVFP4 with straight-through gradients."""
        from .export import group_amax
        own = self.named()
        masters = {n: p.detach() for n, p in own.items()}
        for name, p in own.items():
            w = p
            if quantised and is_nvfp4(name) and p.dim() > 1:
                w = p + (nvfp4.fake_quant(p.detach(), group_amax(name, masters)) - p.detach())
            self.working[name] = w.to(torch.bfloat16) if device == "cuda" and p.dim() > 1 else w


class Mtp(Drafter):
    shifted = True  # norms are stored as w - 1

    def __init__(self):
        c = TEXT_CONFIG
        d, hd, n, g = c["hidden_size"], c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]
        e, f = c["num_experts"], c["moe_intermediate_size"]
        a, m = "mtp.layers.0.self_attn.", "mtp.layers.0.mlp."
        super().__init__({
            "mtp.fc.weight": (d, 2 * d), "mtp.norm.weight": (d,), "mtp.pre_fc_norm_embedding.weight": (d,), "mtp.pre_fc_norm_hidden.weight": (d,),
            "mtp.layers.0.input_layernorm.weight": (d,), "mtp.layers.0.post_attention_layernorm.weight": (d,), a + "q_norm.weight": (hd,),
            a + "k_norm.weight": (hd,), a + "q_proj.weight": (2 * n * hd, d), a + "k_proj.weight": (g * hd, d), a + "v_proj.weight": (g * hd, d),
            a + "o_proj.weight": (d, n * hd), m + "gate.weight": (e, d), m + "shared_expert_gate.weight": (1, d),
            m + "shared_expert.gate_proj.weight": (f, d), m + "shared_expert.up_proj.weight": (f, d), m + "shared_expert.down_proj.weight": (d, f),
            m + "experts.gate_up_proj": (e, 2 * f, d), m + "experts.down_proj": (e, d, f),
        })  # fmt: skip
        self.balance = torch.zeros(())

    def norm(self, x, name):
        return normed(x, 1 + self[name + ".weight"])

    def attention(self, x):
        c, a = TEXT_CONFIG, "mtp.layers.0.self_attn."
        hd = c["head_dim"]
        q, gate = self.linear(x, a + "q_proj").unflatten(-1, (-1, 2 * hd)).chunk(2, -1)
        at = torch.arange(x.shape[1], device=x.device)
        rotary = int(hd * c["partial_rotary_factor"])
        q = rotated(self.norm(q, a + "q_norm").transpose(1, 2), at, rotary, 1e7)
        k = rotated(self.norm(heads(self.linear(x, a + "k_proj"), hd), a + "k_norm"), at, rotary, 1e7)
        y = attended(q, k, heads(self.linear(x, a + "v_proj"), hd), is_causal=True)
        return self.linear(y * torch.sigmoid(gate.flatten(2)), a + "o_proj")

    def mixture(self, x):
        """All experts for all rows: they are few and small."""
        m, used = "mtp.layers.0.mlp.", TEXT_CONFIG["num_experts_per_tok"]
        rows = x.flatten(0, 1)
        chance = self.linear(rows, m + "gate").float().softmax(-1)
        best = chance.topk(used, -1)
        share = torch.zeros_like(chance).scatter(1, best.indices, best.values / best.values.sum(-1, keepdim=True))
        self.balance = len(chance[0]) * ((share > 0).float().mean(0) / used * chance.mean(0)).sum()
        gate, up = torch.einsum("td,efd->etf", rows.to(self[m + "experts.gate_up_proj"].dtype), self[m + "experts.gate_up_proj"]).chunk(2, -1)
        y = torch.einsum("etf,edf->td", F.silu(gate) * up * share.T[..., None].to(gate.dtype), self[m + "experts.down_proj"])
        s = m + "shared_expert."
        shared = self.linear(F.silu(self.linear(rows, s + "gate_proj")) * self.linear(rows, s + "up_proj"), s + "down_proj")
        return (y + torch.sigmoid(self.linear(rows, m + "shared_expert_gate")) * shared).view_as(x)

    def forward(self, hidden, embedded):
        """hidden [B, T, D] of the model's rows, embedded [B, T, D] of the tokens after them: what the head reads."""
        e, h = self.norm(embedded, "mtp.pre_fc_norm_embedding"), self.norm(hidden, "mtp.pre_fc_norm_hidden")
        x = self.linear(torch.cat((e, h), -1), "mtp.fc").float()
        x = x + self.attention(self.norm(x, "mtp.layers.0.input_layernorm"))
        x = x + self.mixture(self.norm(x, "mtp.layers.0.post_attention_layernorm"))
        return self.norm(x, "mtp.norm")


class DflashDrafter(Drafter):
    shifted = False

    def __init__(self):
        c = DFLASH_CONFIG
        d, hd, m = c["hidden_size"], c["head_dim"], c["intermediate_size"]
        q, kv = c["num_attention_heads"] * hd, c["num_key_value_heads"] * hd
        shapes = {"fc.weight": (d, len(TAPS) * d), "hidden_norm.weight": (d,), "norm.weight": (d,)}
        for i in range(c["num_hidden_layers"]):
            p = f"layers.{i}."
            a = p + "self_attn."
            shapes |= {
                p + "input_layernorm.weight": (d,), p + "post_attention_layernorm.weight": (d,), a + "q_norm.weight": (hd,), a + "k_norm.weight": (hd,),
                a + "q_proj.weight": (q, d), a + "k_proj.weight": (kv, d), a + "v_proj.weight": (kv, d), a + "o_proj.weight": (d, q),
                p + "mlp.gate_proj.weight": (m, d), p + "mlp.up_proj.weight": (m, d), p + "mlp.down_proj.weight": (d, m),
            }  # fmt: skip
        super().__init__(shapes)

    def norm(self, x, name):
        return normed(x, self[name + ".weight"])

    def keys(self, x, p, at):
        hd = DFLASH_CONFIG["head_dim"]
        k = rotated(self.norm(heads(self.linear(x, p + "k_proj"), hd), p + "k_norm"), at, hd, 1e4)
        return k, heads(self.linear(x, p + "v_proj"), hd)

    def forward(self, taps, embedded, begin):
        """taps [B, T, A * D]; blocks at begin [B, N], embedded [B, N * BLOCK, D]: what the head reads, [B, N * BLOCK, D]."""
        hd, device = DFLASH_CONFIG["head_dim"], taps.device
        fused = self.norm(self.linear(taps, "fc"), "hidden_norm")
        before = torch.arange(taps.shape[1], device=device).expand(len(taps), -1)
        at = (begin[..., None] + torch.arange(BLOCK, device=device)).flatten(1)
        block = torch.arange(at.shape[1], device=device) // BLOCK
        own = (block[:, None] == block[None]).expand(len(at), -1, -1)
        known = before[:, None] < begin.repeat_interleave(BLOCK, 1)[..., None]
        seen = torch.cat((known, own), -1)[:, None]
        near = ((at[..., None] - torch.cat((before, at), 1)[:, None]).abs() < WINDOW)[:, None]
        x = embedded.float()
        for i, kind in enumerate(DFLASH_CONFIG["layer_types"]):
            p = f"layers.{i}."
            a, n = p + "self_attn.", self.norm(x, p + "input_layernorm")
            q = rotated(self.norm(heads(self.linear(n, a + "q_proj"), hd), a + "q_norm"), at, hd, 1e4)
            k, v = (torch.cat(parts, 2) for parts in zip(self.keys(fused, a, before), self.keys(n, a, at)))
            mask = seen & near if kind == "sliding_attention" else seen
            x = x + self.linear(attended(q, k, v, attn_mask=mask), a + "o_proj")
            n = self.norm(x, p + "post_attention_layernorm")
            x = x + self.linear(F.silu(self.linear(n, p + "mlp.gate_proj")) * self.linear(n, p + "mlp.up_proj"), p + "mlp.down_proj")
        return self.norm(x, "norm")


class Blocks:
    """Where blocks begin, and the tokens that they should say."""

    def __init__(self, ids: torch.Tensor, kind: torch.Tensor, generator: torch.Generator):
        """kind: 2 for tokens of answers, 1 for others, 0 for padding."""
        length = ids.shape[1]
        # A block begins at a token whose next one is the model's own, one in eight of them.
        chance = torch.rand(ids.shape, generator=generator, device=ids.device) * (kind > 0) * (1 + 9 * (torch.roll(kind, -1, 1) == 2))
        chance[:, -1] = chance[:, 0] = 0
        self.begin = chance.topk(max(1, length // BLOCK), 1).indices
        at = self.begin[..., None] + torch.arange(BLOCK, device=ids.device)
        inside, clipped = at < length, at.clamp(max=length - 1)
        self.labels = ids.gather(1, clipped.flatten(1))
        kinds = kind.gather(1, clipped.flatten(1))
        rank = torch.arange(BLOCK, device=ids.device).repeat(self.begin.shape[1])
        self.weight = (kinds == 2) * 1.0 + (kinds == 1) * 0.05
        self.weight = self.weight * inside.flatten(1) * (rank > 0) * 0.85 ** (rank - 1)
        self.tokens = torch.where(rank == 0, self.labels, DFLASH_CONFIG["dflash_config"]["mask_token_id"])


def loss_of(rows, head, labels, weight) -> torch.Tensor:
    keep = weight.flatten() > 0
    logits = (rows.flatten(0, 1)[keep].to(head.dtype) @ head.T).float()
    losses = F.cross_entropy(logits, labels.flatten()[keep], reduction="none")
    return (losses * weight.flatten()[keep]).sum() / weight.sum().clamp(min=1)


class Trainer:
    def __init__(self, folder: Path, device: str, seed: int = 5):
        torch.manual_seed(seed)
        self.device, self.frozen = device, Frozen(folder, device)
        self.mtp, self.dflash = Mtp().to(device), DflashDrafter().to(device)
        named = [(n, p) for d in (self.mtp, self.dflash) for n, p in d.named().items()]
        matrices = [p for n, p in named if n.endswith(("_proj.weight", "fc.weight", "experts.gate_up_proj", "experts.down_proj"))]
        self.rest = [p for n, p in named if not any(p is m for m in matrices)]
        self.all = [p for _, p in named]
        self.muon = Muon(matrices, momentum=0.95, weight_decay=0.05)
        self.adam = torch.optim.AdamW(self.rest, lr=1.0, betas=(0.9, 0.98), weight_decay=0.0, fused=device == "cuda")
        self.generator = torch.Generator(device=device).manual_seed(seed)

    def mtp_rows(self, ids, hidden):
        return self.mtp(hidden[:, :-1], self.frozen.embedding[ids[:, 1:]])

    def step(self, ids, kind, lr: float, quantised: bool) -> tuple:
        ids, kind = ids.to(self.device), kind.to(self.device)
        hidden, taps, best = self.frozen(ids)
        for d in (self.mtp, self.dflash):
            d.load_working(quantised, self.device)
        weight = torch.tensor([0.0, 0.05, 1.0], device=self.device)[torch.roll(kind, -1, 1).long()]
        rows = self.mtp_rows(ids, hidden)
        mtp = loss_of(rows[:, :-1], self.frozen.head, best[:, 1:-1], weight[:, 1:-1])
        blocks = Blocks(ids, kind, self.generator)
        rows = self.dflash(taps, self.frozen.embedding[blocks.tokens], blocks.begin)
        dflash = loss_of(rows, self.frozen.head, blocks.labels, blocks.weight)
        (mtp + dflash + 0.01 * self.mtp.balance).backward()
        torch.nn.utils.clip_grad_norm_(self.all, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        self.muon.step(lr)
        for p in self.all:
            p.grad = None
        return mtp.detach(), dflash.detach()

    @torch.no_grad()
    def measure(self, rows: list) -> tuple:
        """Of held-out answers, as they are: the share of tokens that the layer foresees, and the mean number of right
        tokens at the beginning of a block."""
        for d in (self.mtp, self.dflash):
            d.load_working(True, self.device)
        right = count = length = blocks = 0
        for ids, target in rows:
            x = torch.tensor([ids], device=self.device)
            hidden, taps, best = self.frozen(x)
            answer = [i for i in range(1, len(ids) - 2) if target[i + 1]]
            if not answer:
                continue
            guess = (self.mtp_rows(x, hidden)[0].to(self.frozen.head.dtype) @ self.frozen.head.T).argmax(-1)
            right += sum(int(guess[i - 1] == best[0, i]) for i in answer)
            count += len(answer)
            begin = torch.tensor([answer[::3]], device=self.device)
            tokens = torch.full((1, begin.shape[1] * BLOCK), DFLASH_CONFIG["dflash_config"]["mask_token_id"], device=self.device)
            tokens[0, ::BLOCK] = x[0, begin[0]]
            said = (self.dflash(taps, self.frozen.embedding[tokens], begin)[0].to(self.frozen.head.dtype) @ self.frozen.head.T).argmax(-1).view(-1, BLOCK)
            for b, i in enumerate(answer[::3]):
                end = next((j for j in range(1, BLOCK) if i + j >= len(ids) or int(said[b, j]) != ids[i + j]), BLOCK)
                if i + BLOCK <= len(ids):
                    length, blocks = length + end - 1, blocks + 1
        return right / max(count, 1), length / max(blocks, 1)

    def write(self, folder: Path) -> None:
        """mtp/model_mtp.safetensors, in the model's formats, and the folder dflash, in BF16."""
        own = {n: p.detach().float() for n, p in self.mtp.named().items()}
        out = {n: w.to(torch.bfloat16).contiguous().cpu() for n, w in own.items() if not is_nvfp4(n)}
        for group in groups_of(own):
            amax = torch.stack([w.abs().max() for _, w in group]).max()
            for module, w in group:
                for leaf, tensor in nvfp4.pack(w, amax).items():
                    out[f"{module}.{leaf}"] = tensor
        (folder / "mtp").mkdir(parents=True, exist_ok=True)
        save_file(dict(sorted(out.items())), str(folder / "mtp/model_mtp.safetensors"), metadata={"format": "pt"})
        beside = folder / "dflash"
        beside.mkdir(exist_ok=True)
        out = {n: p.detach().to(torch.bfloat16).contiguous().cpu() for n, p in self.dflash.named().items()}
        save_file(out, str(beside / "model.safetensors"), metadata={"format": "pt"})
        (beside / "config.json").write_text(json.dumps(DFLASH_CONFIG, indent=2) + "\n")


def train(folder: Path, out: Path, steps_of, minutes: float, steps: int, lr: float, held_out: list, device: str) -> Trainer:
    """steps_of: yields lists of batches (ids, kind)."""
    start, trainer, recent, tokens = time.time(), Trainer(folder, device), [], 0
    for step, batches in enumerate(steps_of):
        progress = max(step / steps, (time.time() - start) / (60 * minutes))
        if progress >= 1:
            break
        rate = lr * min(1.0, progress / 0.02) * min(1.0, (1 - progress) / 0.6)
        recent.append(torch.stack(trainer.step(*batches[0], rate, progress > 0.5)))
        tokens += batches[0][0].numel()
        if step < 3 or step % 50 == 0:
            mtp, dflash = torch.stack(recent).mean(0).tolist()
            recent.clear()
            t = time.time() - start
            print(f"step {step} {100 * progress:.0f}% mtp {mtp:.4f} dflash {dflash:.4f} {tokens / t / 1e3:.0f}K tok/s {t:.0f}s", flush=True)
    trainer.write(out)
    right, length = trainer.measure(held_out)
    print(f"trained {step} steps, {tokens / 1e6:.1f} M tokens; held-out answers: MTP {right:.3f} of tokens, DFlash {length:.2f} tokens a block", flush=True)
    return trainer
