#!/usr/bin/env python3
"""Makes tests/vectors/vision: tiny random Qwen3_5Moe and Qwen3_5 checkpoints with vision towers, and what transformers answers
about drawn images, in float32.

    python3 scripts/make_vision_vectors.py        # seconds; needs torch, torchvision, transformers (5.17.0), safetensors, Pillow

<model>/checkpoint                the checkpoint
<model>/<case>.golden.safetensors image.<i> U8, PNG files; patches U8 [N, K], all images' as the processor has them; features
                                  F32 [S, D]; ids I32, with one image token for each image; expanded I32 [T]; positions I32 [3, T];
                                  logits F32 [T, V]; greedy I32, the ids that follow; bf16 F32 [2], how far transformers' own
                                  BF16 is from its float32, relative: features, and the median row of logits
<model>/<case>.video.safetensors  frame.<i> U8, PNG files; times I32 [pairs], by how many words each pair is preceded; patches,
                                  features, expanded, positions, logits, greedy as above, of a prompt in which each pair of
                                  frames has marks of its own
positions.safetensors             of 500 random layouts: texts I32 [500, 5], tokens before each image and behind the last one;
                                  grids I32 [500, 4, 2], rows and columns of each image in tokens, 0: none; positions I16 [sum, 3]
"""
import copy
import io
import json
import pathlib
import shutil

import numpy as np
import torch
from safetensors.torch import save_file

import parity_models
from make_image_vectors import picture
from quant_formats import to_bf16

OUT = pathlib.Path(__file__).resolve().parent.parent / "tests" / "vectors" / "vision"
STEPS, LAYOUTS = 16, 500
VISION = {"depth": 3, "hidden_size": 144, "intermediate_size": 208, "num_heads": 2, "patch_size": 8, "temporal_patch_size": 2,
          "spatial_merge_size": 2, "in_channels": 3, "num_position_embeddings": 64, "hidden_act": "gelu_pytorch_tanh",
          "deepstack_visual_indexes": [], "initializer_range": 0.02}
PREPROCESSOR = {"size": {"shortest_edge": 1024, "longest_edge": 8192}, "patch_size": 8, "temporal_patch_size": 2, "merge_size": 2,
                "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "image_processor_type": "Qwen2VLImageProcessorFast"}
SPECS = [
    parity_models.Spec("moe", "a mixture", seed=31, formats=("bf16",), layers=4, head_dim=64),
    parity_models.Spec("dense", "one MLP a layer", seed=32, formats=("bf16",), layers=4, head_dim=64, dense=80, kv_heads=1,
                       mtp="inside"),
]
# Widths and heights of the images, and how many text tokens stand before each image and behind the last one.
CASES = {"one": ([(50, 90)], [5, 9]), "two": ([(70, 33), (20, 21)], [3, 4, 6]), "wide": ([(200, 30)], [0, 7]),
         "three": ([(64, 64), (31, 64), (90, 45)], [70, 1, 0, 80])}

# Numbers of frames, their size, and how many text tokens stand before and behind them.
VIDEOS = {"four": (4, (70, 44), [3, 6]), "five": (5, (33, 90), [0, 4]), "single": (1, (40, 20), [2, 2])}
VIDEO_PREPROCESSOR = {"size": {"shortest_edge": 1024, "longest_edge": 12288}, "patch_size": 8, "temporal_patch_size": 2,
                      "merge_size": 2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
                      "video_processor_type": "Qwen3VLVideoProcessor"}


def tower(spec):
    """Every parameter random, norms and biases, too."""
    random = np.random.default_rng(spec.seed + 9)
    h, m, p = VISION["hidden_size"], VISION["intermediate_size"], VISION["patch_size"]
    out = {}

    def matrix(name, rows, cols, shape=None):
        out[name + ".weight"] = to_bf16(random.standard_normal((rows, cols)) * 1.3 / np.sqrt(cols)).reshape(shape or (rows, cols))
        out[name + ".bias"] = to_bf16(random.standard_normal(rows) * 0.2)

    def norm(name):
        out[name + ".weight"] = to_bf16(1 + random.standard_normal(h) * 0.2)
        out[name + ".bias"] = to_bf16(random.standard_normal(h) * 0.2)

    matrix("patch_embed.proj", h, 6 * p * p, (h, 3, 2, p, p))
    out["pos_embed.weight"] = to_bf16(random.standard_normal((VISION["num_position_embeddings"], h)) * 0.5)
    for i in range(VISION["depth"]):
        b = f"blocks.{i}."
        norm(b + "norm1"), norm(b + "norm2")
        matrix(b + "attn.qkv", 3 * h, h), matrix(b + "attn.proj", h, h)
        matrix(b + "mlp.linear_fc1", m, h), matrix(b + "mlp.linear_fc2", h, m)
    norm("merger.norm")
    matrix("merger.linear_fc1", 4 * h, 4 * h), matrix("merger.linear_fc2", spec.hidden, 4 * h)
    return {"model.visual." + n: w for n, w in out.items()}


def make_config(spec):
    config = parity_models.config(spec)
    config["text_config"]["rope_parameters"]["mrope_section"] = [3, 3, 2]
    config["vision_config"] = {**VISION, "model_type": config["model_type"], "out_hidden_size": spec.hidden}
    return config


def write_checkpoint(spec, folder):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(make_config(spec), indent=1) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(parity_models.generation_config(spec), indent=1) + "\n")
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR, indent=1) + "\n")
    (folder / "video_preprocessor_config.json").write_text(json.dumps(VIDEO_PREPROCESSOR, indent=1) + "\n")
    weights = {(n if n.startswith("lm_head") else "model.language_model." + n): w
               for n, w in parity_models.random_weights(spec).items()}
    weights.update(tower(spec))
    extra = parity_models.mtp_weights(spec) if spec.mtp else {}
    tensors = {n: torch.from_numpy(np.ascontiguousarray(w)).to(torch.bfloat16) for n, w in {**weights, **extra}.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return {n: torch.from_numpy(np.ascontiguousarray(w)).float() for n, w in weights.items()}


def load(spec, weights):
    import transformers

    kind = "Qwen3_5" if spec.dense else "Qwen3_5Moe"
    config = getattr(transformers, kind + "Config")(**make_config(spec))
    config._attn_implementation = "eager"
    config.text_config._experts_implementation = "eager"
    model = getattr(transformers, kind + "ForConditionalGeneration")(config).float().eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if [n for n in missing if "rotary" not in n and "inv_freq" not in n] or unexpected:
        raise ValueError(f"missing {missing[:5]}, unexpected {unexpected[:5]}")
    return model


def processor():
    from transformers import Qwen2VLImageProcessorFast

    return Qwen2VLImageProcessorFast(**{k: v for k, v in PREPROCESSOR.items() if k != "image_processor_type"})


def relative(own, other):
    return float((own.float() - other).norm() / other.norm())


def in_bf16(model):
    """The same model with its parameters in BF16; buffers, such as frequencies, stay."""
    copied = copy.deepcopy(model)
    for p in copied.parameters():
        p.data = p.data.to(torch.bfloat16)
    return copied


def features_of(model, pixels, grid):
    features = model.model.get_image_features(pixels.to(next(model.parameters()).dtype), grid)
    features = features.pooler_output if hasattr(features, "pooler_output") else features
    return (torch.cat(list(features)) if isinstance(features, (list, tuple)) else features).float()


def answer(run, tokens):
    """The ids that follow, up to the first that is nearly a tie, which would be chance."""
    ids = []
    for _ in range(STEPS):
        row = run(tokens + ids)[-1]
        best = row.topk(2).values
        if float(best[0] - best[1]) < 2e-3 * float(row.abs().max()):
            break
        ids.append(int(row.argmax()))
    return ids


@torch.no_grad()
def golden(spec, model, number, sizes, texts):
    from transformers.image_utils import load_image  # noqa: F401  (the processor takes PIL images)

    random = np.random.default_rng(spec.seed + 50 + number)
    token = model.config.image_token_id
    images = [picture(w, h, 60 + 10 * number + i) for i, (w, h) in enumerate(sizes)]
    out = {}
    for i, image in enumerate(images):
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        out[f"image.{i}"] = torch.from_numpy(np.frombuffer(buffer.getvalue(), np.uint8).copy())
    data = processor()(images=images, return_tensors="pt")
    grid = data["image_grid_thw"]
    ids, expanded = [], []
    for i, count in enumerate(texts):
        words = random.integers(0, spec.special, count).tolist()
        ids += words
        expanded += words
        if i < len(images):
            marks = [spec.vocab - 6, spec.vocab - 5]  # around the image
            ids += [marks[0], token, marks[1]]
            expanded += [marks[0]] + [token] * int(grid[i].prod() // 4) + [marks[1]]
    features = features_of(model, data["pixel_values"], grid)

    def run(tokens, model=model):
        tokens = torch.tensor([tokens])
        kinds, dtype = (tokens == token).int(), next(model.parameters()).dtype
        return model(input_ids=tokens, pixel_values=data["pixel_values"].to(dtype), image_grid_thw=grid, mm_token_type_ids=kinds,
                     attention_mask=torch.ones_like(tokens), use_cache=False).logits[0].float()

    tokens = torch.tensor([expanded])
    positions, _ = model.model.get_rope_index(tokens, mm_token_type_ids=(tokens == token).int(), image_grid_thw=grid,
                                              attention_mask=torch.ones_like(tokens))
    logits, rounded = run(expanded), in_bf16(model)
    rows = [relative(own, other) for own, other in zip(run(expanded, rounded), logits)]
    out["bf16"] = torch.tensor([relative(features_of(rounded, data["pixel_values"], grid), features), float(np.median(rows))])
    out["patches"] = (data["pixel_values"].float() * 127.5 + 127.5).round().to(torch.uint8)
    out["features"] = features.float().contiguous()
    out["ids"], out["expanded"] = torch.tensor(ids, dtype=torch.int32), torch.tensor(expanded, dtype=torch.int32)
    out["positions"] = positions[:, 0].to(torch.int32).contiguous()
    out["logits"], out["greedy"] = logits.contiguous(), torch.tensor(answer(run, expanded), dtype=torch.int32)
    print(spec.name, sizes, grid.tolist(), len(expanded), "tokens,", len(out["greedy"]), "greedy; BF16:", out["bf16"].tolist())
    return out


def frames(count, width, height, seed):
    """A picture that moves to the right, under noise of its own."""
    wide = picture(width + 7 * count, height, seed)
    return [wide.crop((7 * i, 0, 7 * i + width, height)) for i in range(count)]


@torch.no_grad()
def video_golden(spec, model, number, count, size, texts):
    from transformers import Qwen3VLVideoProcessor

    random = np.random.default_rng(spec.seed + 90 + number)
    token = model.config.video_token_id
    images, out = frames(count, *size, 80 + number), {}
    for i, image in enumerate(images):
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        out[f"frame.{i}"] = torch.from_numpy(np.frombuffer(buffer.getvalue(), np.uint8).copy())
    settings = {k: v for k, v in VIDEO_PREPROCESSOR.items() if k != "video_processor_type"}
    clip = np.stack([np.asarray(i) for i in images])
    if count == 1:
        clip = np.repeat(clip, 2, 0)
    data = Qwen3VLVideoProcessor(**settings)(videos=[torch.from_numpy(clip.copy()).permute(0, 3, 1, 2)], do_sample_frames=False,
                                             cap_pixels_per_frame=True, return_tensors="pt")
    grid, pixels = data["video_grid_thw"], data["pixel_values_videos"].float()
    pads, expanded, times = int(grid[0, 1] * grid[0, 2] // 4), random.integers(0, spec.special, texts[0]).tolist(), []
    for _ in range(int(grid[0, 0])):
        times.append(int(random.integers(3, 6)))
        expanded += random.integers(0, spec.special, times[-1]).tolist()
        expanded += [spec.vocab - 6] + [token] * pads + [spec.vocab - 5]
    expanded += random.integers(0, spec.special, texts[1]).tolist()
    features = model.model.get_video_features(pixels, grid)
    features = features.pooler_output if hasattr(features, "pooler_output") else features
    features = torch.cat(list(features)) if isinstance(features, (list, tuple)) else features

    def run(tokens):
        tokens = torch.tensor([tokens])
        return model(input_ids=tokens, pixel_values_videos=pixels, video_grid_thw=grid, mm_token_type_ids=(tokens == token).int() * 2,
                     attention_mask=torch.ones_like(tokens), use_cache=False).logits[0].float()

    tokens = torch.tensor([expanded])
    positions, _ = model.model.get_rope_index(tokens, mm_token_type_ids=(tokens == token).int() * 2, video_grid_thw=grid,
                                              attention_mask=torch.ones_like(tokens))
    out["patches"] = (pixels * 127.5 + 127.5).round().to(torch.uint8)
    out["features"], out["expanded"] = features.float().contiguous(), torch.tensor(expanded, dtype=torch.int32)
    out["times"], out["positions"] = torch.tensor(times, dtype=torch.int32), positions[:, 0].to(torch.int32).contiguous()
    out["logits"], out["greedy"] = run(expanded).contiguous(), torch.tensor(answer(run, expanded), dtype=torch.int32)
    print(spec.name, "video", count, size, grid.tolist(), len(expanded), "tokens,", len(out["greedy"]), "greedy")
    return out


def layouts(model):
    random, token = np.random.default_rng(77), model.config.image_token_id
    texts, grids, rows = np.zeros((LAYOUTS, 5), np.int32), np.zeros((LAYOUTS, 4, 2), np.int32), []
    for i in range(LAYOUTS):
        tokens, images = [], int(random.integers(0, 5))
        for k in range(images + 1):
            texts[i, k] = random.integers(1, 12)
            tokens += [1] * int(texts[i, k])
            if k < images:
                grids[i, k] = random.integers(1, 8, 2)
                tokens += [token] * int(grids[i, k].prod())
        ids = torch.tensor([tokens])
        thw = torch.tensor([[1, 2 * int(h), 2 * int(w)] for h, w in grids[i, :images]], dtype=torch.long) if images else None
        positions, _ = model.model.get_rope_index(ids, mm_token_type_ids=(ids == token).int(), image_grid_thw=thw,
                                                  attention_mask=torch.ones_like(ids))
        rows.append(positions[:, 0].T.to(torch.int16))
    return {"texts": torch.from_numpy(texts), "grids": torch.from_numpy(grids), "positions": torch.cat(rows).contiguous()}


def main():
    for spec in SPECS:
        model = load(spec, write_checkpoint(spec, OUT / spec.name / "checkpoint"))
        for number, (name, (sizes, texts)) in enumerate(CASES.items()):
            save_file(golden(spec, model, number, sizes, texts), OUT / spec.name / f"{name}.golden.safetensors")
        for number, (name, (count, size, texts)) in enumerate(VIDEOS.items()):
            save_file(video_golden(spec, model, number, count, size, texts), OUT / spec.name / f"{name}.video.safetensors")
    save_file(layouts(model), OUT / "positions.safetensors")


if __name__ == "__main__":
    main()
