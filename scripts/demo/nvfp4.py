"""NVFP4 quantiser, compressed-tensors convention: w = e2m1(code) * e4m3(scale) / G, G = 448 * 6 / amax."""
import torch

GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def to_grid(x: torch.Tensor) -> torch.Tensor:
    """Round-to-nearest on the E2M1 magnitudes, ties to the even code, saturating at 6. Keeps the sign."""
    a = x.abs()
    low, mid, high = torch.round(a * 2) / 2, torch.round(a), (torch.round(a / 2) * 2).clamp(max=6.0)
    return torch.where(a < 2, low, torch.where(a < 4, mid, high)) * torch.sign(x)


def scales(w: torch.Tensor, amax: torch.Tensor):
    """w [..., N, K] float32; amax broadcastable to [..., 1, 1]: (G [..., 1, 1], block scale [..., N, K/16] in float32)."""
    g = 448.0 * 6.0 / amax.clamp(min=torch.finfo(torch.float32).tiny)
    block = w.unflatten(-1, (-1, 16)).abs().amax(-1)
    local = (g * block / 6.0).clamp(max=448.0).to(torch.float8_e4m3fn).float()
    return g, torch.where(local == 0, torch.full_like(local, 0.125), local)


def codes_and_values(w: torch.Tensor, g: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    blocks = w.unflatten(-1, (-1, 16))
    return to_grid(blocks * g.unsqueeze(-1) / local.unsqueeze(-1))


def fake_quant(w: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    g, local = scales(w, amax)
    return (codes_and_values(w, g, local) * local.unsqueeze(-1) / g.unsqueeze(-1)).flatten(-2)


def pack(w: torch.Tensor, amax: torch.Tensor) -> dict:
    """The three tensors of one Linear w [N, K]; amax may come from a group that shares one global scale."""
    w = w.float()
    g, local = scales(w, amax.reshape(1, 1))
    values = codes_and_values(w, g, local).flatten(-2)
    index = torch.bucketize(values.abs(), torch.tensor(GRID, device=w.device)).to(torch.uint8)
    code = index | (torch.signbit(values).to(torch.uint8) << 3)
    return {
        "weight_packed": (code[:, 0::2] | (code[:, 1::2] << 4)).contiguous().cpu(),
        "weight_scale": local.to(torch.float8_e4m3fn).contiguous().cpu(),
        "weight_global_scale": g.reshape(1).float().cpu(),
    }
