#!/usr/bin/env python3
"""Whether quern reads every layout of a set of tiny checkpoints right: the same weights in 16 bits give the same logits.

    verify_layouts.py FOLDER --quern build/quern [--gpu]

Every directory of FOLDER is one checkpoint. Its tensors keep their names, dtypes and shapes, and get random values whose
scales are powers of two, so that every weight is exact in BF16. Decoded here, in numpy, the weights are written once
more as plain BF16 under their official names, experts one by one. Then quern reads a prompt and writes 8 tokens from
both: the tokens must be equal, and the logits of the prompt within 1e-5 relative. --gpu: also on the GPU, which rounds
activations to BF16: the median prompt token may be 1.5 times as far from the CPU's as it is with the BF16 weights. For a
checkpoint that quern refuses, the reason is printed. Needs numpy.
"""

import argparse
import json
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile

import numpy as np

LIMIT = 1e-5
GPU_RATIO = 1.5
PROMPT, ANSWER = 24, 8
BYTES = {"BF16": 2, "F16": 2, "F32": 4, "U8": 1, "I8": 1, "F8_E4M3": 1, "I32": 4, "I64": 8}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
E4M3 = np.array([(-1) ** (b >> 7) * ((b & 7) * 2.0**-9 if (b >> 3 & 15) == 0
                                     else (1 + (b & 7) / 8) * 2.0 ** ((b >> 3 & 15) - 7)) for b in range(256)], np.float32)
SCALES = (".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".weight_global_scale")


def read_tensors(folder):
    """{name: (dtype, shape)} of all shards."""
    out = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as f:
            header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        out |= {n: (t["dtype"], t["shape"]) for n, t in header.items() if n != "__metadata__"}
    return out


def write_tensors(path, tensors):
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            f.write(data)


def to_bytes(values, dtype):
    """float32 whose lower bits are zero where dtype is BF16."""
    values = np.asarray(values, np.float32)
    if dtype == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype({"F16": np.float16, "F32": np.float32}[dtype]).tobytes()


def to_floats(dtype, shape, data):
    if dtype == "BF16":
        values = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(data, {"F16": np.float16, "F32": np.float32}[dtype]).astype(np.float32)
    return values.reshape(shape)


def rounded(values):
    """To 8 significant bits: exact in BF16, and in F16 at this size."""
    return (np.asarray(values, np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


def float_values(name, shape, random):
    power = lambda low, high: 2.0 ** random.integers(low, high, shape)
    if name.endswith(".weight_global_scale"):
        return power(11, 13)
    if name.endswith(".weight_scale_2"):
        return power(-12, -10)
    if name.endswith(SCALES):
        return power(-10, -8)
    if name.endswith("norm.weight"):
        return rounded(random.normal(0, 0.1, shape))
    if name.endswith("A_log"):
        return rounded(random.uniform(0, 1, shape))
    if name.endswith(("conv1d.weight", "dt_bias")):
        return rounded(random.normal(0, 0.3, shape))
    if name.endswith("_scale"):
        return power(-1, 2)
    return rounded(random.normal(0, 0.05, shape))


def fill(name, dtype, shape, random):
    """Random bytes that make sense for this tensor."""
    count = int(np.prod(shape, dtype=np.int64))
    if dtype in ("BF16", "F16", "F32"):
        return to_bytes(float_values(name, shape, random), dtype)
    if dtype == "F8_E4M3" and name.endswith(".weight_scale"):
        return random.integers(0x58, 0x70, count, dtype=np.uint8).tobytes()
    if dtype == "F8_E4M3":
        return (random.integers(0, 0x7F, count, dtype=np.uint8) | random.integers(0, 2, count, dtype=np.uint8) << 7).tobytes()
    return random.integers(0, 256, count * BYTES.get(dtype, 1), dtype=np.uint8).tobytes()


def codes_to_weights(tensors, module, codes, shape, experts):
    """NVFP4: code * block scale * global scale; of stacked experts each may have its own."""
    values = np.frombuffer(codes, np.uint8).reshape(-1, shape[-1])
    values = np.stack([E2M1[values & 15], E2M1[values >> 4]], -1).reshape(len(values), -1)
    scale = E4M3[np.frombuffer(tensors[module + ".weight_scale"][2], np.uint8)].reshape(len(values), -1)
    inverse = module + ".weight_global_scale" in tensors
    g = to_floats(*tensors[module + (".weight_global_scale" if inverse else ".weight_scale_2")]).ravel()
    g = 1 / g if inverse else g
    weights = values * np.repeat(scale, 16, 1)
    if experts == 0:
        return weights * g
    return weights.reshape(experts, -1, weights.shape[1]) * g.reshape(-1, 1, 1)


def fp8_to_weights(tensors, module, data, shape):
    weights = E4M3[np.frombuffer(data, np.uint8)].reshape(shape)
    name = next(module + s for s in (".weight_scale", ".weight_scale_inv") if module + s in tensors)
    scale = to_floats(*tensors[name])
    if scale.size == 1:
        return weights * scale.ravel()[0]
    if scale.size == shape[0]:
        return weights * scale.reshape(-1, 1)
    blocks = scale.reshape(-(-shape[0] // 128), -(-shape[1] // 128))
    return weights * np.repeat(np.repeat(blocks, 128, 0)[:shape[0]], 128, 1)[:, :shape[1]]


def official(name):
    rest = re.sub(r"^(model\.|language_model\.)+", "", name)
    if rest.startswith(("visual.", "vision_tower.", "mtp.")):
        return None
    return rest if rest.startswith("lm_head.") else "model.language_model." + rest


def plain(tensors, experts):
    """The text model without quantization, under official names."""
    out = {}
    keep = lambda name, values: out.__setitem__(name, ("BF16", values.shape, to_bytes(values, "BF16")))
    for name, (dtype, shape, data) in tensors.items():
        target = official(name)
        if target is None or name.endswith((*SCALES, "_scale")):
            continue
        module = re.sub(r"\.weight(_packed)?$", "", name)
        target_module = re.sub(r"\.weight(_packed)?$", "", target)
        stacked = experts if target_module.endswith((".experts.gate_up_proj", ".experts.down_proj")) else 0
        if dtype == "U8":
            weights = codes_to_weights(tensors, module, data, shape, stacked)
        elif dtype == "F8_E4M3":
            weights = fp8_to_weights(tensors, module, data, shape)
        else:
            out[target] = (dtype, shape, data)
            continue
        assert (rounded(weights) == weights).all(), f"{name}: not exact in BF16"
        if not stacked:
            keep(target_module + ".weight", weights)
            continue
        base = target_module.rsplit(".", 1)[0]
        for e, w in enumerate(weights):
            if target_module.endswith("down_proj"):
                keep(f"{base}.{e}.down_proj.weight", w)
            else:
                keep(f"{base}.{e}.gate_proj.weight", w[:len(w) // 2])
                keep(f"{base}.{e}.up_proj.weight", w[len(w) // 2:])
    return out


def refill(folder, target, random):
    """A copy of the checkpoint with random values; returns its tensors."""
    tensors = {n: (dtype, shape, fill(n, dtype, shape, random)) for n, (dtype, shape) in read_tensors(folder).items()}
    target.mkdir()
    for path in folder.glob("*.json"):
        if not path.name.endswith(".index.json"):
            shutil.copy(path, target)
    write_tensors(target / "model.safetensors", tensors)
    return tensors


def run(quern, folder, ids, out, device="0"):
    command = [quern, "run", "--ids", "-", "-n", str(ANSWER), "--temp", "0", "-t", "2", "-ngl", device, "--ignore-eos",
               "--no-vision", "--dump-logits", str(out), str(folder)]
    done = subprocess.run(command, input=ids, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{folder}: {done.stderr}")
    return done.stdout.split(), np.load(out).astype(np.float64)


def median_error(ours, theirs):
    return float(np.median(np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(theirs, axis=1)))


def compare(quern, stored, tensors, config, work, random, gpu):
    """The line's text, and whether both are the same model."""
    text = config.get("text_config", config)
    (work / "plain").mkdir()
    config.pop("quantization_config", None)
    text.pop("quantization_config", None)
    (work / "plain" / "config.json").write_text(json.dumps(config))
    write_tensors(work / "plain" / "model.safetensors", plain(tensors, text.get("num_experts", 0)))
    ids = " ".join(map(str, random.integers(0, text["vocab_size"], PROMPT)))
    on = lambda folder, device: run(quern, folder, ids, work / "logits.npy", device)
    (tokens, logits), (plain_tokens, plain_logits) = on(stored, "0"), on(work / "plain", "0")
    if tokens != plain_tokens:
        raise SystemExit(f"{stored}: {tokens}, from the plain weights {plain_tokens}")
    error = float(np.linalg.norm(logits - plain_logits) / np.linalg.norm(plain_logits))
    line = f"error {error:.1e}, {len(set(tokens))} different tokens of {len(tokens)}"
    if not gpu:
        return line, error <= LIMIT
    found = median_error(on(stored, "all")[1], logits)
    usual = median_error(on(work / "plain", "all")[1], plain_logits)
    return f"{line}; GPU {found:.1e}, BF16 {usual:.1e}", error <= LIMIT and found <= GPU_RATIO * usual


def verify(quern, folder, work, gpu):
    """One line for the checkpoint, and what quern says about it; False if the logits differ."""
    random = np.random.default_rng(1)
    tensors = refill(folder, work / "stored", random)
    audit = subprocess.run([quern, "quantize-inspect", str(work / "stored"), "--audit"], capture_output=True, text=True)
    lines = (audit.stdout + audit.stderr).splitlines()
    ok = True
    if audit.returncode:
        print(f"{folder.name:24} refused, code {audit.returncode}")
    else:
        config = json.loads((folder / "config.json").read_text())
        text, ok = compare(quern, work / "stored", tensors, config, work, random, gpu)
        scheme = next((line.split(":")[0].split(None, 1)[1] for line in lines if line.strip().startswith("scheme")), "")
        print(f"{folder.name:24} {'ok' if ok else 'FAIL'}, {text}, {scheme}")
    for line in lines:
        if line.startswith(("note:", "problem:", "quern: error")):
            print("    " + line[:400])
    return ok


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--quern", required=True)
    parser.add_argument("--only", default="", help="a part of the names")
    parser.add_argument("--gpu", action="store_true", help="run on the GPU, too")
    a = parser.parse_args()
    ok = True
    for folder in sorted(p for p in a.folder.iterdir() if (p / "config.json").exists() and a.only in p.name):
        with tempfile.TemporaryDirectory() as work:
            ok = verify(a.quern, folder, pathlib.Path(work), a.gpu) and ok
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
