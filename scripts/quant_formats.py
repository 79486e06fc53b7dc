"""Quantisers of the checkpoint formats, in numpy: NVFP4 (two spellings) and FP8 (three granularities).

They write test checkpoints. Reading is done elsewhere (reference_model.py) and by other means, so that an error here
does not cancel out there. Every function takes float32 [N, K] and returns the tensors of one linear module, by suffix.

  nvfp4_ct      weight_packed U8 [N, K/2], weight_scale E4M3 [N, K/16], weight_global_scale F32 [1]   w = code * s / G
  nvfp4_mo      weight U8 [N, K/2], weight_scale E4M3 [N, K/16], weight_scale_2 F32 []                w = code * s * s2
  fp8_tensor    weight E4M3 [N, K], weight_scale F32 []
  fp8_channel   weight E4M3 [N, K], weight_scale BF16 [N, 1]
  fp8_block     weight E4M3 [N, K], weight_scale BF16 [ceil(N/128), ceil(K/128)] (fp8_block_inv: weight_scale_inv)

Sources of the layouts: compressed-tensors, NVIDIA ModelOpt, the Qwen FP8 releases, OCP Microscaling (E2M1, E4M3).
"""

import numpy as np
import torch

BLOCK = 16
FP8_BLOCK = 128
MAX_CODE, MAX_SCALE = np.float32(6), np.float32(448)

# All finite non-negative E4M3 values by code 0x00..0x7e.
E4M3 = np.array([m * 2.0**-9 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)
                 for e in range(16) for m in range(8)][:127], dtype=np.float32)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)


def nearest_even(values, table):
    """Index of the nearest table entry for each |value|, ties to the even index, saturating at the last entry."""
    a = np.abs(values.astype(np.float64))
    table = table.astype(np.float64)
    high = np.clip(np.searchsorted(table, a), 1, len(table) - 1)
    low = high - 1
    below, above = a - table[low], table[high] - a
    take_low = (below < above) | ((below == above) & (low % 2 == 0))
    return np.where(take_low, low, high).astype(np.uint8)


def to_e4m3(x):
    """float32 -> E4M3 codes: nearest, ties to even, saturating at 448 (never NaN)."""
    return nearest_even(x, E4M3) | np.where(np.signbit(x), 0x80, 0).astype(np.uint8)


def from_e4m3(codes):
    return np.where(codes & 0x80, -1, 1).astype(np.float32) * E4M3[codes & 0x7F]


def to_e2m1(x):
    return nearest_even(x, E2M1) | np.where(x < 0, 8, 0).astype(np.uint8)


def pack_nibbles(codes):
    """[N, K] codes -> U8 [N, K/2]: element 2j in the low nibble of byte j, element 2j+1 in the high one."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def to_bf16(x):
    """float32 rounded to the nearest BF16 value, as float32."""
    return torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)).to(torch.bfloat16).float().numpy()


def u8(codes):
    return torch.from_numpy(np.ascontiguousarray(codes))


def e4m3(codes):
    return u8(codes).view(torch.float8_e4m3fn)


def scalar(x):
    return torch.tensor(float(x), dtype=torch.float32)


def block_amax(w):
    n, k = w.shape
    if k % BLOCK:
        raise ValueError(f"NVFP4 needs K to be a multiple of {BLOCK}, got {k}")
    return np.abs(w).reshape(n, k // BLOCK, BLOCK).max(-1)


def global_scale(amax):
    """compressed-tensors G = 448 * 6 / amax; a matrix of zeros gets 1.0."""
    return np.float32(1) if amax == 0 else np.float32(MAX_SCALE * MAX_CODE / np.float32(amax))


def nvfp4_ct(w, amax=None):
    """`amax` may be that of a group of projections which share one global scale (q/k/v, gate/up)."""
    g = global_scale(np.abs(w).max() if amax is None else amax)
    local = to_e4m3(np.minimum(g * (block_amax(w) / MAX_CODE), MAX_SCALE))
    local = np.where(local == 0, to_e4m3(np.float32([0.125]))[0], local)
    step = np.repeat(from_e4m3(local), BLOCK, axis=1)
    codes = to_e2m1(w * g / step)
    return {"weight_packed": u8(pack_nibbles(codes)), "weight_scale": e4m3(local),
            "weight_global_scale": torch.tensor([g], dtype=torch.float32)}


def nvfp4_mo(w, amax=None):
    s2 = np.float32((np.abs(w).max() if amax is None else amax) / (MAX_CODE * MAX_SCALE))
    if s2 == 0:
        raise ValueError("ModelOpt NVFP4 has no scale for a matrix of zeros")
    blocks = block_amax(w) / (MAX_CODE * s2)
    local = to_e4m3(np.clip(np.where(blocks == 0, np.float32(1), blocks), np.float32(2.0**-9), MAX_SCALE))
    step = np.repeat(from_e4m3(local), BLOCK, axis=1) * s2
    return {"weight": u8(pack_nibbles(to_e2m1(w / step))), "weight_scale": e4m3(local), "weight_scale_2": scalar(s2)}


def fp8_tensor(w):
    scale = np.float32(np.abs(w).max() / MAX_SCALE)
    return {"weight": e4m3(to_e4m3(w / scale)), "weight_scale": scalar(scale)}


def fp8_channel(w):
    scale = to_bf16(np.abs(w).max(1, keepdims=True) / MAX_SCALE)
    return {"weight": e4m3(to_e4m3(w / scale)), "weight_scale": torch.from_numpy(scale).to(torch.bfloat16)}


def fp8_block(w, name="weight_scale"):
    n, k = w.shape
    rows, cols = -(-n // FP8_BLOCK), -(-k // FP8_BLOCK)
    scale = np.empty((rows, cols), np.float32)
    for r in range(rows):
        for c in range(cols):
            tile = w[r * FP8_BLOCK:(r + 1) * FP8_BLOCK, c * FP8_BLOCK:(c + 1) * FP8_BLOCK]
            scale[r, c] = np.abs(tile).max() / MAX_SCALE
    scale = to_bf16(scale)
    step = np.repeat(np.repeat(scale, FP8_BLOCK, 0)[:n], FP8_BLOCK, 1)[:, :k]
    return {"weight": e4m3(to_e4m3(w / step)), name: torch.from_numpy(scale).to(torch.bfloat16)}


def fp8_block_inv(w):
    return fp8_block(w, "weight_scale_inv")


QUANTISERS = {"nvfp4_ct": nvfp4_ct, "nvfp4_mo": nvfp4_mo, "fp8_tensor": fp8_tensor, "fp8_channel": fp8_channel,
              "fp8_block": fp8_block, "fp8_block_inv": fp8_block_inv}


def self_check():
    """The worked example and rounding samples of the formats' definition, and agreement with torch's E4M3 cast."""
    samples = np.float32([0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 5.01, 100])
    assert E2M1[to_e2m1(samples)].tolist() == [0, 0.5, 1, 1, 2, 2, 4, 4, 6, 6]
    assert [float(E4M3[c]) for c in (0x01, 0x08, 0x38, 0x7E)] == [2.0**-9, 2.0**-6, 1.0, 448.0]
    x = np.float32(np.random.default_rng(1).standard_normal(20000) * np.logspace(-4, 2.6, 20000))
    x = np.clip(np.concatenate([x, E4M3, (E4M3[1:] + E4M3[:-1]) / 2]), -448, 448).astype(np.float32)
    torch_codes = torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(to_e4m3(x), torch_codes)
    # A block with G = 2688/0.32 and scale 128 whose first four codes are 1, 2, 15, 7 packs to bytes 0x21 0x7f.
    g = np.float32(2688 / 0.32)
    w = np.zeros((1, 32), np.float32)
    w[0, :4] = np.float32([0.5, 1, -6, 6]) * 128 / g
    w[0, 16] = 0.32
    out = nvfp4_ct(w)
    assert out["weight_packed"][0, :2].tolist() == [0x21, 0x7F]
    assert out["weight_scale"].view(torch.uint8)[0].tolist() == [0x70, 0x7E]
    assert abs(float(out["weight_global_scale"][0]) / 8400 - 1) < 1e-6
    out = nvfp4_mo(w)
    assert out["weight"][0, :2].tolist() == [0x21, 0x7F] and abs(float(out["weight_scale_2"]) / 1.1904762e-4 - 1) < 1e-6


if __name__ == "__main__":
    self_check()
    print("quantisers agree with the worked example and with torch's E4M3 cast")
