#!/usr/bin/env python3
"""Reads a checkpoint that `quern quantize-inspect --write` made with other people's code, and compares with quern.

    scripts/verify_written.py DIR --quern build/quern [--original BF16DIR]

Needs torch (CPU), safetensors and compressed-tensors (0.17). Checks that

  - safetensors reads every tensor, and the index names each where it is;
  - compressed-tensors takes the quantization_config, and resolves every module to the format it is stored in;
  - its decompressors (for ModelOpt's form: the formula code * scale * weight_scale_2) give the floats that quern reads:
    they are written as an F32 checkpoint, against which `quern quantize-inspect --against` must find a relative error
    of at most 2^-23, the rounding of a division that quern does as a multiplication;
  - with --original: quantizing that with compressed-tensors gives the same bytes, for a checkpoint written with
    "scales": "amax" (for "mse": no fewer errors are made by it).

Exit code 0: all is well.
"""
import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from compressed_tensors.utils.match import is_match
from safetensors import safe_open
from safetensors.torch import save_file

PARTS = ("weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale")
failures = []


def check(good, message):
    if not good:
        failures.append(message)


class Folder:
    """All tensors of a checkpoint, read one at a time."""

    def __init__(self, path):
        self.path, self.files, self.where = path, {}, {}
        for file in sorted(path.glob("*.safetensors")):
            self.files[file.name] = safe_open(str(file), framework="pt")
            for name in self.files[file.name].keys():
                check(name not in self.where, f"{name}: in two files")
                self.where[name] = file.name
        index = path / "model.safetensors.index.json"
        if index.exists():
            check(json.loads(index.read_text())["weight_map"] == self.where, "the index is not what the files hold")
        else:
            check(len(self.files) == 1, "several files without an index")

    def __contains__(self, name):
        return name in self.where

    def get(self, name):
        return self.files[self.where[name]].get_tensor(name)

    def modules(self):
        """Name of the module -> suffixes of its tensors, for all that are a matrix."""
        out = {}
        for name in self.where:
            module, _, part = name.rpartition(".")
            if part in PARTS:
                out.setdefault(module, set()).add(part)
        return {m: p for m, p in out.items() if not (p == {"weight"} and self.get(m + ".weight").dim() != 2)}


def kind_of(folder, module, parts):
    if "weight_packed" in parts:
        return "nvfp4-pack-quantized"
    if parts == {"weight"}:
        return None
    return "modelopt" if "weight_scale_2" in parts else "float-quantized"


def schemes(config, modules, folder):
    """The scheme that compressed-tensors resolves for every module; checks it against what is stored."""
    parsed = QuantizationConfig.model_validate(config)
    out, linear = {}, torch.nn.Linear(1, 1, device="meta")
    for module, parts in modules.items():
        if module.endswith(("embed_tokens", "pos_embed")):
            continue
        kind = kind_of(folder, module, parts)
        found = None
        if not any(is_match(module, linear, entry) for entry in parsed.ignore or []):
            # Exact names and expressions come before class names.
            for scheme in sorted(parsed.config_groups.values(), key=lambda s: "Linear" in s.targets):
                if any(is_match(module, linear, target) for target in scheme.targets):
                    found = scheme
                    break
        fmt = None if found is None else (found.format or parsed.format)
        check(fmt == kind, f"{module}: the config says {fmt}, stored is {kind}")
        out[module] = found
    return out


def decompress(folder, module, parts, scheme):
    """The matrix as compressed-tensors computes it, in float32."""
    tensors = {p: folder.get(f"{module}.{p}") for p in parts}
    if "weight_scale_2" in parts:
        codes = tensors["weight"]
        values = unpack_fp4_from_uint8(codes, codes.shape[0], codes.shape[1] * 2, dtype=torch.float32)
        step = tensors["weight_scale"].float() * tensors["weight_scale_2"].float()
        return values * step.repeat_interleave(16, dim=1)
    if "weight_packed" in parts:
        # As NVFP4PackedCompressor.decompress, in float32 instead of the model's bfloat16.
        codes = tensors["weight_packed"]
        values = unpack_fp4_from_uint8(codes, codes.shape[0], codes.shape[1] * 2, dtype=torch.float32)
        return dequantize(x_q=values, scale=tensors["weight_scale"].float(), args=scheme.weights,
                          global_scale=tensors["weight_global_scale"], dtype=torch.float32)
    scale = tensors.get("weight_scale", tensors.get("weight_scale_inv")).float()
    if scheme is not None and scheme.weights.strategy != "block":
        return dequantize(x_q=tensors["weight"].float(), scale=scale, args=scheme.weights, dtype=torch.float32)
    rows, cols = tensors["weight"].shape
    if scale.dim() == 4:  # ModelOpt's [down, 1, across, 1]
        scale = scale[:, 0, :, 0]
    if scale.dim() == 1 and scale.numel() == rows:
        scale = scale[:, None]
    if scale.numel() > 1 and scale.shape[0] != rows:
        scale = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]
    return tensors["weight"].float() * scale


def original_of(original, module):
    """[N, K] of a module in a BF16 checkpoint, experts one by one or stacked."""
    if module + ".weight" in original:
        return original.get(module + ".weight").float()
    stem, _, part = module.rpartition(".")
    stem, _, expert = stem.rpartition(".")
    if part == "down_proj":
        return original.get(stem + ".down_proj")[int(expert)].float()
    both = original.get(stem + ".gate_up_proj")[int(expert)].float()
    half = both.shape[0] // 2
    return both[:half] if part == "gate_proj" else both[half:]


def group_amax(original, module, weight):
    stem, _, part = module.rpartition(".")
    for family in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("in_proj_qkv", "in_proj_z"),
                   ("in_proj_a", "in_proj_b")):
        if part in family:
            return max(original_of(original, f"{stem}.{p}").abs().max() for p in family)
    return weight.abs().max()


def compare_bytes(folder, original, module, scheme, totals):
    """Codes and scales of compressed-tensors' own quantizer, with the amax that matrices share which engines fuse."""
    w = original_of(original, module)
    amax = group_amax(original, module, w)
    # torch divides a number by a tensor as number * (1 / tensor): the last bit may differ.
    g = folder.get(f"{module}.weight_global_scale")
    check(abs(float(g / generate_gparam(-amax, amax)) - 1) <= 2.0**-23, f"{module}: another global scale")
    blocks = w.unflatten(1, (-1, 16))
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=g)
    codes = pack_fp4_to_uint8(quantize(x=w, scale=scale, zero_point=None, global_scale=g, args=scheme.weights))
    got = {p: folder.get(f"{module}.{p}") for p in ("weight_packed", "weight_scale", "weight_global_scale")}
    totals["modules"] += 1
    same = got["weight_scale"].view(torch.uint8) == scale.to(torch.float8_e4m3fn).view(torch.uint8)
    totals["scales"] += same.numel()
    totals["same scales"] += int(same.sum())
    same = got["weight_packed"] == codes
    totals["code bytes"] += same.numel()
    totals["same code bytes"] += int(same.sum())
    ours = decompress(folder, module, set(got), scheme)
    theirs = dequantize(x_q=unpack_fp4_from_uint8(codes, *w.shape, dtype=torch.float32), scale=scale.float(),
                        args=scheme.weights, global_scale=g, dtype=torch.float32)
    totals["error"] += float(((ours - w) ** 2).sum())
    totals["their error"] += float(((theirs - w) ** 2).sum())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--quern", default="build/quern")
    parser.add_argument("--original", type=Path)
    args = parser.parse_args()
    folder = Folder(args.directory)
    modules = folder.modules()
    config = json.loads((args.directory / "config.json").read_text())["quantization_config"]
    resolved = schemes(config, modules, folder) if config["quant_method"] == "compressed-tensors" else {}
    quantized = {m: p for m, p in modules.items() if p != {"weight"}}
    with tempfile.TemporaryDirectory() as temporary:
        plain = {m + ".weight": decompress(folder, m, p, resolved.get(m)).contiguous() for m, p in quantized.items()}
        scales = {f"{m}.{p}" for m, parts in quantized.items() for p in parts}
        plain.update({n: folder.get(n) for n in folder.where
                      if n not in scales and not n.endswith((".input_scale", ".input_global_scale"))})
        save_file(plain, f"{temporary}/model.safetensors", metadata={"format": "pt"})
        body = json.loads((args.directory / "config.json").read_text())
        del body["quantization_config"]
        Path(temporary, "config.json").write_text(json.dumps(body))
        result = subprocess.run([args.quern, "quantize-inspect", "-m", str(args.directory), "--against", temporary, "--json"],
                                capture_output=True, text=True)
        check(result.returncode == 0, f"quern --against: exit code {result.returncode}: {result.stderr[:500]}")
        report = json.loads(result.stdout)
    worst = max((m["relative_rms"] for m in report["matrices"]), default=1)
    check(worst <= 2.0**-23, f"quern reads other floats: relative error {worst}")
    missing = {m.removeprefix("model.").removeprefix("language_model.") for m in modules}
    missing -= {m["name"].removeprefix("model.").removeprefix("language_model.") for m in report["matrices"]}
    check(not missing, f"not compared by quern: {sorted(missing)[:5]}")
    print(f"{len(folder.where)} tensors in {len(folder.files)} files; {len(quantized)} quantized matrices, "
          f"{sum(m['different'] == 0 for m in report['matrices'])} of {len(modules)} read to the bit, worst relative error {worst:.3g}")
    if args.original:
        original = Folder(args.original)
        totals = dict.fromkeys(("modules", "scales", "same scales", "code bytes", "same code bytes", "error",
                                "their error"), 0)
        for module, parts in quantized.items():
            if "weight_packed" in parts:
                compare_bytes(folder, original, module, resolved[module], totals)
        print("against the quantizer of compressed-tensors:", json.dumps(totals))
        check(totals["error"] <= 1.0001 * totals["their error"], "compressed-tensors quantizes better")
    for failure in failures[:20]:
        print("FAILED:", failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
