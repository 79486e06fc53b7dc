"""NVFP4 by round to nearest: the quantizer for training (values) and for export (codes), and the way back."""
import torch

CODES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# Halfway points; ties go to the even code.
BOUNDS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def round_codes(x: torch.Tensor) -> torch.Tensor:
    """Magnitude codes 0..7 of |x|, saturating."""
    a = x.abs()
    bounds = BOUNDS.to(x.device)
    up = torch.bucketize(a, bounds, right=True)  # a tie goes up
    down = torch.bucketize(a, bounds, right=False)  # a tie goes down
    return torch.where(up % 2 == 0, up, down)


def quantize(w: torch.Tensor, amax: torch.Tensor) -> tuple:
    """w [..., K], amax (broadcasts over [..., 1]) -> (signed codes [..., K], scales [..., K/16] e4m3, divisor G)."""
    w = w.float()
    g = 2688.0 / amax.clamp_min(1e-12)
    blocks = w.unflatten(-1, (-1, 16))
    scale = (g * blocks.abs().amax(-1) / 6).clamp(max=448).to(torch.float8_e4m3fn)
    scale = torch.where(scale.float() == 0, torch.tensor(0.125, device=w.device), scale.float())
    codes = round_codes(blocks * g.unsqueeze(-1) / scale.unsqueeze(-1)).flatten(-2)
    return codes + 8 * (w < 0), scale.to(torch.float8_e4m3fn), g


def dequantize(codes: torch.Tensor, scale: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    values = CODES.to(codes.device)[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
    return (values.unflatten(-1, (-1, 16)) * scale.float().unsqueeze(-1)).flatten(-2) / g


def fake_quantize(w: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    return dequantize(*quantize(w, amax)).to(w.dtype)


def pack(codes: torch.Tensor) -> torch.Tensor:
    pairs = codes.to(torch.uint8).unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


class Quantized:
    """The parameters that the published recipe stores in NVFP4: attention, experts, shared expert."""

    def __init__(self, model):
        self.groups = []  # (parameters that share a largest value, whether each expert has its own)
        layers = model.model.language_model.layers
        for layer in layers:
            if hasattr(layer, "self_attn"):
                a = layer.self_attn
                self.groups.append(([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight], False))
                self.groups.append(([a.o_proj.weight], False))
            m = layer.mlp
            self.groups.append(([m.experts.gate_up_proj], True))
            self.groups.append(([m.experts.down_proj], True))
            self.groups.append(([m.shared_expert.gate_proj.weight, m.shared_expert.up_proj.weight], False))
            self.groups.append(([m.shared_expert.down_proj.weight], False))

    @staticmethod
    def amax(group: list, per_expert: bool) -> torch.Tensor:
        if per_expert:
            return group[0].detach().float().abs().amax((1, 2), keepdim=True)
        return torch.stack([p.detach().float().abs().max() for p in group]).max().reshape(1, 1)

    @torch.no_grad()
    def apply(self) -> list:
        """Replaces the weights by what NVFP4 makes of them; returns what restore() needs."""
        saved = []
        for group, per_expert in self.groups:
            amax = self.amax(group, per_expert)
            for p in group:
                saved.append((p, p.data.clone()))
                p.data.copy_(fake_quantize(p.data, amax))
        return saved

    @staticmethod
    @torch.no_grad()
    def restore(saved: list) -> None:
        for p, data in saved:
            p.data.copy_(data)
