#!/usr/bin/env python3
"""Writes a random checkpoint with the layout of a published release of Qwen3.6-35B-A3B or 27B, full size by default.

    make_synthetic_checkpoint.py DIR                               22 GB, seconds on many cores and a RAM disk
    make_synthetic_checkpoint.py DIR --layers 4 --experts 16       a small one of the same shapes
    make_synthetic_checkpoint.py DIR --dense                       the dense Qwen3.6-27B instead, 27 GB
    make_synthetic_checkpoint.py DIR --mix bf16                    70 GB, as it is before quantization
    make_synthetic_checkpoint.py DIR --mix nvidia [--dense]        nvidia's 35B and 27B
    make_synthetic_checkpoint.py DIR --mix qwen-fp8                Qwen's own FP8, 36 GB

For tests of loading and of the whole model without a download. Mixes:

    aeon      compressed-tensors: NVFP4 attention, experts and shared expert or MLPs, the rest BF16
    fp8-head  and lm_head FP8 in [128,128] blocks
    xs        aeon and NVFP4 linear attention
    nvidia    ModelOpt: attention and linear attention FP8, one scale a matrix; experts and shared expert or MLPs, and
              lm_head, NVFP4; the small in_proj_a and in_proj_b BF16
    qwen-fp8  FP8 in [128,128] blocks but for lm_head, in_proj_a and in_proj_b
    bf16      all BF16, experts stacked, as Qwen releases them

The values are sane: weights near N(0, 0.02), norms near 1, legal scales that differ from projection to projection, logits
of order 1. The same seed gives the same bytes on any number of cores. The tokenizer is copied from models/demo, so text
stays within its vocabulary. No vision tower, no MTP block. Needs numpy.
"""

import argparse
import dataclasses
import functools
import json
import math
import multiprocessing
import os
import pathlib
import re
import shutil
import statistics

import numpy as np

DEMO = pathlib.Path(__file__).resolve().parent.parent / "models" / "demo"
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
WEIGHT = 0.02                  # standard deviation of the weights
ROUTER = 0.06                  # clearer choices than weights of 0.02 give, as trained routers make them
EMBEDDING = 6.0                # no single layer swamps the residual stream, so BF16 noise grows slowly with depth
CODES_PER_DEVIATION = 6 / 2.2  # the largest of 16 normal values is near 2.2 deviations; code 7 stands for 6
SCALES = (0x68, 0x78)          # E4M3 block scales from 64 to 240
CHUNK = 1 << 20                # random numbers drawn at a time
ITEM_BYTES = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}


# ---- values: fill(random, count) gives `count` items as bytes

def quantiles(count):
    """The standard normal distribution as `count` equally likely values."""
    normal = statistics.NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)], dtype=np.float32)


@functools.cache
def normal_table():
    return quantiles(1 << 16)


def to_bf16(x):
    bits = np.asarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def nearest(values, table):
    return np.abs(np.abs(values)[:, None] - table).argmin(1).astype(np.uint8)


@functools.cache
def bf16_table(mean, deviation):
    return to_bf16(mean + deviation * normal_table())


@functools.cache
def code_table():
    """16 random bits -> a byte of two E2M1 codes."""
    z = quantiles(256) * CODES_PER_DEVIATION
    codes = nearest(z, np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])) | np.where(z < 0, 8, 0).astype(np.uint8)
    return (codes[None, :] | codes[:, None] << 4).reshape(-1)


@functools.cache
def fp8_table():
    """16 random bits -> an E4M3 value of a block whose scale maps 4 deviations to 448."""
    e4m3 = np.float32([m / 512 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127])
    z = quantiles(256) * 112
    codes = nearest(z, e4m3) | np.where(z < 0, 0x80, 0).astype(np.uint8)
    return np.repeat(codes, 256)


def bits16(random, count):
    return random.bit_generator.random_raw(-(-count // 4)).view(np.uint16)[:count]


def normal(mean, deviation):
    return lambda random, count: bf16_table(mean, deviation)[bits16(random, count)]


def codes(random, count):
    return code_table()[bits16(random, count)]


def block_scales(random, count):
    return random.integers(*SCALES, count, dtype=np.uint8)


def global_scale(random, count):
    """compressed-tensors' divisor: what brings code times block scale to WEIGHT, give or take a quarter."""
    typical = 2.6 * 136 / WEIGHT
    return (typical * random.uniform(0.8, 1.25, count)).astype(np.float32)


def input_scale(random, count):
    return random.uniform(50, 150, count).astype(np.float32)


def fp8(random, count):
    return fp8_table()[bits16(random, count)]


def fp8_scales(random, count):
    return to_bf16(WEIGHT / 112 * random.uniform(0.8, 1.25, count))


def multiplier(random, count):
    """ModelOpt's global scale: the reciprocal of compressed-tensors' divisor."""
    return 1 / global_scale(random, count)


def fp8_scale(random, count):
    return (WEIGHT / 112 * random.uniform(0.8, 1.25, count)).astype(np.float32)


def activation_scale(random, count):
    return random.uniform(0.01, 0.05, count).astype(np.float32)


def decay(random, count):
    return to_bf16(np.log(random.uniform(0.5, 8, count)))


# ---- tensors: (name, dtype, shape, fill)

def bf16(module, rows, cols, deviation=WEIGHT):
    return [(module + ".weight", "BF16", (rows, cols), normal(0, deviation))]


def nvfp4(module, rows, cols):
    return [(module + ".weight_packed", "U8", (rows, cols // 2), codes),
            (module + ".weight_scale", "F8_E4M3", (rows, cols // 16), block_scales),
            (module + ".weight_global_scale", "F32", (1,), global_scale),
            (module + ".input_global_scale", "F32", (1,), input_scale)]


def fp8_block(module, rows, cols):
    return [(module + ".weight", "F8_E4M3", (rows, cols), fp8),
            (module + ".weight_scale", "BF16", (-(-rows // 128), -(-cols // 128)), fp8_scales)]


def fp8_block_inv(module, rows, cols):
    values, scales = fp8_block(module, rows, cols)
    return [values, (scales[0] + "_inv", *scales[1:])]


def fp8_tensor(module, rows, cols):
    return [(module + ".weight", "F8_E4M3", (rows, cols), fp8), (module + ".weight_scale", "F32", (), fp8_scale),
            (module + ".input_scale", "F32", (), activation_scale)]


def nvfp4_modelopt(module, rows, cols):
    return [(module + ".weight", "U8", (rows, cols // 2), codes),
            (module + ".weight_scale", "F8_E4M3", (rows, cols // 16), block_scales),
            (module + ".weight_scale_2", "F32", (), multiplier),
            (module + ".input_scale", "F32", (), activation_scale)]


@dataclasses.dataclass(frozen=True)
class Mix:
    """How each part of a model is stored. feed_forward: experts and shared expert, or MLPs."""
    attention: callable
    delta: callable
    delta_gates: callable  # in_proj_a, in_proj_b
    feed_forward: callable
    head: callable
    method: str = ""       # quant_method of the configuration


MIXES = {"aeon": Mix(nvfp4, bf16, bf16, nvfp4, bf16, "compressed-tensors"),
         "fp8-head": Mix(nvfp4, bf16, bf16, nvfp4, fp8_block, "compressed-tensors"),
         "xs": Mix(nvfp4, nvfp4, nvfp4, nvfp4, bf16, "compressed-tensors"),
         "nvidia": Mix(fp8_tensor, fp8_tensor, bf16, nvfp4_modelopt, nvfp4_modelopt, "modelopt"),
         "qwen-fp8": Mix(fp8_block_inv, fp8_block_inv, bf16, fp8_block_inv, bf16, "fp8"),
         "bf16": Mix(bf16, bf16, bf16, bf16, bf16)}


def vector(name, size, mean=0.0, deviation=0.1):
    return [(name, "BF16", (size,), normal(mean, deviation))]


def attention(p, c, linear):
    d, out = c["head_dim"], []
    for name, heads in (("q_proj", 2 * c["num_attention_heads"]), ("k_proj", c["num_key_value_heads"]),
                        ("v_proj", c["num_key_value_heads"])):
        out += linear(p + name, heads * d, c["hidden_size"])
    out += linear(p + "o_proj", c["hidden_size"], c["num_attention_heads"] * d)
    return out + vector(p + "q_norm.weight", d) + vector(p + "k_norm.weight", d)


def delta(p, c, linear, gates):
    heads, width = c["linear_num_value_heads"], c["hidden_size"]
    values = heads * c["linear_value_head_dim"]
    channels = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"] + values
    out = [(p + "conv1d.weight", "BF16", (channels, 1, c["linear_conv_kernel_dim"]), normal(0, 0.5)),
           (p + "A_log", "BF16", (heads,), decay)]
    for name, rows in (("in_proj_qkv", channels), ("in_proj_z", values)):
        out += linear(p + name, rows, width)
    for name in ("in_proj_a", "in_proj_b"):
        out += gates(p + name, heads, width)
    out += linear(p + "out_proj", width, values) + vector(p + "dt_bias", heads, -4, 1)
    return out + vector(p + "norm.weight", c["linear_value_head_dim"], 1)  # the only norm not stored as w - 1


def feed_forward(p, width, inner, linear):
    return [*linear(p + "gate_proj", inner, width), *linear(p + "up_proj", inner, width),
            *linear(p + "down_proj", width, inner)]


def experts(p, c, linear):
    count, width, inner = c["num_experts"], c["hidden_size"], c["moe_intermediate_size"]
    if linear is bf16:
        return [(p + "gate_up_proj", "BF16", (count, 2 * inner, width), normal(0, WEIGHT)),
                (p + "down_proj", "BF16", (count, width, inner), normal(0, WEIGHT))]
    return [t for e in range(count) for t in feed_forward(f"{p}{e}.", width, inner, linear)]


def layer(i, c, mix):
    p, width = f"model.language_model.layers.{i}.", c["hidden_size"]
    out = vector(p + "input_layernorm.weight", width) + vector(p + "post_attention_layernorm.weight", width)
    if c["layer_types"][i] == "full_attention":
        out += attention(p + "self_attn.", c, mix.attention)
    else:
        out += delta(p + "linear_attn.", c, mix.delta, mix.delta_gates)
    if "intermediate_size" in c:
        return sorted(out + feed_forward(p + "mlp.", width, c["intermediate_size"], mix.feed_forward))
    out += bf16(p + "mlp.gate", c["num_experts"], width, ROUTER) + bf16(p + "mlp.shared_expert_gate", 1, width)
    out += feed_forward(p + "mlp.shared_expert.", width, c["shared_expert_intermediate_size"], mix.feed_forward)
    return sorted(out + experts(p + "mlp.experts.", c, mix.feed_forward))


def model_parts(c, mix):
    """The tensors in groups that are filled, and put into shards, as a whole."""
    vocab, width = c["vocab_size"], c["hidden_size"]
    head = mix.head("lm_head", vocab, width)
    embedding = bf16("model.language_model.embed_tokens", vocab, width, EMBEDDING)
    layers = [layer(i, c, mix) for i in range(c["num_hidden_layers"])]
    return [head, embedding, vector("model.language_model.norm.weight", width), *layers]


# ---- config.json

def text_config(a):
    types = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(a.layers)]
    rope = {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
            "mrope_section": [11, 11, 10]}
    heads, kv_heads, value_heads = (24, 4, 48) if a.dense else (16, 2, 32)
    second_half = {"intermediate_size": a.mlp_width} if a.dense else {
        "num_experts": a.experts, "num_experts_per_tok": min(8, a.experts), "moe_intermediate_size": a.expert_width,
        "shared_expert_intermediate_size": a.expert_width, "mlp_only_layers": []}
    return {"model_type": "qwen3_5_text" if a.dense else "qwen3_5_moe_text", "dtype": "bfloat16",
            "vocab_size": a.vocab, "hidden_size": a.hidden,
            "num_hidden_layers": a.layers, "full_attention_interval": 4, "layer_types": types,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 256, "attn_output_gate": True,
            "attention_bias": False, "attention_dropout": 0.0, "linear_num_key_heads": 16,
            "linear_num_value_heads": value_heads,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
            "mamba_ssm_dtype": "float32", "hidden_act": "silu", **second_half, "rms_norm_eps": 1e-6,
            "max_position_embeddings": 262144, "rope_parameters": rope, "partial_rotary_factor": 0.25,
            "mtp_num_hidden_layers": 0, "tie_word_embeddings": False, "use_cache": True}


def scheme(bits, strategy, **more):
    return {"num_bits": bits, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False, **more}


def linear_modules(parts):
    """(module, dtype of its values) of every matrix but the embedding."""
    out = {}
    for name, dtype, shape, _ in (t for part in parts for t in part):
        module, _, suffix = name.rpartition(".")
        if suffix in ("weight", "weight_packed") and len(shape) == 2 and "embed" not in module:
            out[module] = dtype
    return out


def compressed_tensors(modules, mix):
    groups = {"group_0": {"targets": ["Linear"], "format": "nvfp4-pack-quantized", "output_activations": None,
                          "weights": scheme(4, "tensor_group", group_size=16),
                          "input_activations": {**scheme(4, "tensor_group", group_size=16), "dynamic": "local"}}}
    if mix.head is fp8_block:
        groups["group_1"] = {"targets": ["re:.*lm_head$"], "format": "float-quantized", "output_activations": None,
                             "weights": scheme(8, "block", block_structure=[128, 128]),
                             "input_activations": {**scheme(8, "group", group_size=128), "dynamic": True}}
    return {"quant_method": "compressed-tensors", "version": "0.13.0", "quantization_status": "compressed",
            "format": "nvfp4-pack-quantized" if len(groups) == 1 else "mixed-precision", "config_groups": groups,
            "ignore": sorted(m for m, dtype in modules.items() if dtype == "BF16"), "kv_cache_scheme": None,
            "global_compression_ratio": None, "sparsity_config": {}, "transform_config": {}}


def modelopt(modules):
    """nvidia's: every quantized matrix by name, the experts of a layer as one."""
    how = {"F8_E4M3": {"quant_algo": "FP8"}, "U8": {"quant_algo": "W4A16_NVFP4", "group_size": 16}}
    layers = {re.sub(r"(\.experts)\..*", r"\1", m): how[dtype] for m, dtype in modules.items() if dtype in how}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers,
            "ignore": ["mtp.layers.0*", "mtp*"], "producer": {"name": "modelopt", "version": "0.45.0"}}


def hf_quant_config(quantization):
    body = {"quant_algo": quantization["quant_algo"], "kv_cache_quant_algo": "FP8",
            "quantized_layers": quantization["quantized_layers"], "exclude_modules": quantization["ignore"]}
    return {"producer": quantization["producer"], "quantization": body}


def qwen_fp8(modules):
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
            "modules_to_not_convert": sorted(m for m, dtype in modules.items() if dtype == "BF16")}


def quantization_config(parts, mix):
    modules = linear_modules(parts)
    if mix.method == "modelopt":
        return modelopt(modules)
    return qwen_fp8(modules) if mix.method == "fp8" else compressed_tensors(modules, mix)


def config(text, parts, mix):
    dense = "intermediate_size" in text
    quantization = {"quantization_config": quantization_config(parts, mix)} if mix.method else {}
    return {"architectures": [f"Qwen3_5{'' if dense else 'Moe'}ForConditionalGeneration"],
            "model_type": "qwen3_5" if dense else "qwen3_5_moe",
            "tie_word_embeddings": False, "text_config": text, "language_model_only": True, **quantization}


# ---- files

def tensor_bytes(tensor):
    return math.prod(tensor[2]) * ITEM_BYTES[tensor[1]]


def shards_of(parts, limit):
    """Indices of parts for each file: as many whole parts as stay below the limit."""
    out, size = [[]], 0
    for i, part in enumerate(parts):
        bytes_ = sum(tensor_bytes(t) for t in part)
        if out[-1] and size + bytes_ > limit:
            out.append([])
            size = 0
        out[-1].append(i)
        size += bytes_
    return out


def start_shard(path, parts):
    """Writes the header; the place of each part's data in the file."""
    entries, at, places = {"__metadata__": {"format": "pt"}}, 0, []
    for part in parts:
        places.append(at)
        for tensor in part:
            name, dtype, shape, _ = tensor
            begin, at = at, at + tensor_bytes(tensor)
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, at]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as f:
        f.write(len(header).to_bytes(8, "little") + header)
        f.truncate(8 + len(header) + at)
    return [8 + len(header) + p for p in places]


JOBS = []  # (path, place, index, part); filled before the processes fork


def fill_part(job):
    path, place, index, part, seed = JOBS[job]
    random = np.random.Generator(np.random.SFC64([seed, index]))
    with open(path, "r+b") as f:
        f.seek(place)
        for _, _, shape, fill in part:
            count = math.prod(shape)
            for begin in range(0, count, CHUNK):
                f.write(fill(random, min(CHUNK, count - begin)).data)


def write_checkpoint(folder, text, a):
    folder.mkdir(parents=True, exist_ok=True)
    parts = model_parts(text, MIXES[a.mix])
    files, weight_map = shards_of(parts, a.shard_gb * 1e9), {}
    for n, indices in enumerate(files):
        name = f"model-{n + 1:05d}-of-{len(files):05d}.safetensors"
        places = start_shard(folder / name, [parts[i] for i in indices])
        JOBS.extend((folder / name, place, i, parts[i], a.seed) for i, place in zip(indices, places))
        weight_map.update({t[0]: name for i in indices for t in parts[i]})
    normal_table(), code_table(), fp8_table()  # made once, inherited by the processes
    with multiprocessing.get_context("fork").Pool(a.jobs) as pool:
        pool.map(fill_part, range(len(JOBS)), chunksize=1)
    total = sum(tensor_bytes(t) for part in parts for t in part)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    settings = config(text, parts, MIXES[a.mix])
    (folder / "config.json").write_text(json.dumps(settings, indent=1) + "\n")
    if a.mix == "nvidia":
        (folder / "hf_quant_config.json").write_text(json.dumps(hf_quant_config(settings["quantization_config"])) + "\n")
    for name in TEXT_FILES:
        shutil.copyfile(pathlib.Path(a.tokenizer) / name, folder / name)
    return total, len(weight_map), len(files)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog=__doc__.split("\n", 1)[1],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--mix", choices=tuple(MIXES), default="aeon")
    parser.add_argument("--dense", action="store_true", help="the family of the 27B: one MLP a layer, no experts")
    parser.add_argument("--layers", type=int, help="40; dense: 64")
    parser.add_argument("--hidden", type=int, help="2048; dense: 5120")
    parser.add_argument("--mlp-width", type=int, default=17408, help="of a dense model's MLPs")
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--expert-width", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=248320)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shard-gb", type=float, default=2.6, help="largest file (2.6)")
    parser.add_argument("--tokenizer", default=str(DEMO), help="directory of the tokenizer files (models/demo)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (one a core)")
    a = parser.parse_args()
    a.layers = a.layers or (64 if a.dense else 40)
    a.hidden = a.hidden or (5120 if a.dense else 2048)
    if a.hidden % 16 or a.expert_width % 16 or a.mlp_width % 16:
        parser.error("--hidden, --expert-width and --mlp-width must be multiples of 16, the block of NVFP4")
    total, tensors, files = write_checkpoint(pathlib.Path(a.directory), text_config(a), a)
    print(f"{a.directory}: {total / 1e9:.2f} GB, {tensors} tensors in {files} files")


if __name__ == "__main__":
    main()
