"""The demo checkpoint with a small vision tower of random weights, in a folder of its own: it sees something, and talks as before."""
import json
import os
import pathlib
import random
import struct

WIDTH, HEADS, MLP, PATCH, SIDE = 48, 2, 40, 8, 4
DEMO = pathlib.Path(__file__).resolve().parents[1] / "models" / "demo"


def shapes(out):
    """Names, shapes and the size of values."""
    yield "patch_embed.proj.weight", (WIDTH, 3, 2, PATCH, PATCH), 0.1
    yield "patch_embed.proj.bias", (WIDTH,), 0.1
    yield "pos_embed.weight", (SIDE * SIDE, WIDTH), 0.3
    for norm in ("blocks.0.norm1", "blocks.0.norm2", "merger.norm"):
        yield norm + ".weight", (WIDTH,), 1
        yield norm + ".bias", (WIDTH,), 0.1
    for name, rows, columns in (("blocks.0.attn.qkv", 3 * WIDTH, WIDTH), ("blocks.0.attn.proj", WIDTH, WIDTH),
                                ("blocks.0.mlp.linear_fc1", MLP, WIDTH), ("blocks.0.mlp.linear_fc2", WIDTH, MLP),
                                ("merger.linear_fc1", 4 * WIDTH, 4 * WIDTH), ("merger.linear_fc2", out, 4 * WIDTH)):
        yield name + ".weight", (rows, columns), columns ** -0.5
        yield name + ".bias", (rows,), 0.1


def bf16(value):
    return struct.pack("<f", value)[2:]


def safetensors(tensors):
    header, data = {}, b""
    for name, (shape, values) in tensors.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def write(folder):
    """The weights of the text model are a link; the tower is a file beside them, with an index of both."""
    folder, randoms = pathlib.Path(folder), random.Random(5)
    config = json.loads((DEMO / "config.json").read_text())
    out = config["text_config"]["hidden_size"]
    tensors = {}
    for name, shape, scale in shapes(out):
        count = 1
        for n in shape:
            count *= n
        tensors["model.visual." + name] = (shape, b"".join(bf16(randoms.gauss(0, scale)) for _ in range(count)))
    config["language_model_only"] = False
    config["vision_config"] = {"depth": 1, "hidden_size": WIDTH, "num_heads": HEADS, "intermediate_size": MLP, "patch_size": PATCH,
                               "num_position_embeddings": SIDE * SIDE, "out_hidden_size": out}
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors"):
        os.symlink(DEMO / name, folder / name)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"size": {"shortest_edge": 2048, "longest_edge": 65536}, "patch_size": PATCH}))
    (folder / "model_vision.safetensors").write_bytes(safetensors(tensors))
    with open(DEMO / "model.safetensors", "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    files = {name: "model.safetensors" for name in header if name != "__metadata__"}
    files.update({name: "model_vision.safetensors" for name in tensors})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return str(folder)
