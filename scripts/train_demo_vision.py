#!/usr/bin/env python3
"""Trains a vision tower for the demo checkpoint, whose text model stays as it is, and measures what it sees.

    python3 scripts/train_demo_vision.py --out DIR --minutes 4.5   # on one H100-class GPU
    python3 scripts/train_demo_vision.py --out DIR --check         # no training: the tower against transformers' own

Needs torch, transformers 5.17, tokenizers, safetensors. All pictures and questions come from scripts/demo/drawings.py; seeds are
fixed. DIR becomes a whole checkpoint: the demo's files, the tower in model_vision.safetensors, held-out pictures with questions in
DIR/eval_vision, one that it described rightly in DIR/drawing.png, the measured accuracy in DIR/accuracy_vision.json, and in
DIR/vectors what tests/vectors/demo/vision is. --minutes stops the training cleanly at that time.
"""
import argparse
import json
import random
import shutil
import sys
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from demo import drawings, vision
from demo.drafters import unpacked
from demo.model import build
from demo.optim import Muon
from demo.tokenizer import ADDRESSABLE, IDS

SIZES = [(128, 128), (128, 128), (128, 160), (160, 128), (160, 160), (192, 160), (160, 192), (192, 192)]  # heights and widths


class Batch:
    """Pictures of one size and conversations about them, as ids; -1 in place of the picture's tokens."""

    def __init__(self, tokenizer, scenes: list, size: tuple, rng: random.Random, device: str, generator, thinking=None):
        self.pictures = drawings.draw(scenes, *size, device, generator)
        self.tokens = size[0] * size[1] // 1024
        self.asked, rows = [], []
        for scene in scenes:
            kind, question, thought, answer = scene.ask(rng)
            think = rng.random() < 0.5 if thinking is None else thinking
            prompt = self.prompt(tokenizer, question, think)
            target = (f"{thought}\n</think>\n\n" if think else "") + answer
            said = tokenizer.encode(target).ids + [IDS["<|im_end|>"]]
            self.asked.append((kind, question, think, answer, len(prompt)))
            rows.append((prompt, said))
        length = max(len(p) + len(s) for p, s in rows)
        pad = IDS["<|endoftext|>"]
        self.ids = torch.tensor([p + s + [pad] * (length - len(p) - len(s)) for p, s in rows], device=device)
        self.weight = torch.tensor([[0.0] * len(p) + [1.0] * len(s) + [0.0] * (length - len(p) - len(s)) for p, s in rows], device=device)

    def part(self, members: list):
        out = Batch.__new__(Batch)
        out.pictures, out.ids, out.asked = self.pictures[members], self.ids[members], [self.asked[i] for i in members]
        return out

    def prompt(self, tokenizer, question: str, think: bool) -> list:
        ids = [IDS["<|im_start|>"], *tokenizer.encode("user\n").ids, IDS["<|vision_start|>"]] + [-1] * self.tokens + [IDS["<|vision_end|>"]]
        ids += tokenizer.encode(question).ids + [IDS["<|im_end|>"], *tokenizer.encode("\n").ids, IDS["<|im_start|>"]]
        return ids + tokenizer.encode("assistant\n<think>\n" if think else "assistant\n<think>\n\n</think>\n\n").ids


def rope_positions(ids: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """[3, B, T]: a picture counts as many positions as its longer side has tokens."""
    begin = int((ids[0] < 0).nonzero()[0])
    t = torch.arange(ids.shape[1], device=ids.device)
    inside = (t - begin).clamp(0, rows * columns - 1)
    after = t - rows * columns + max(rows, columns)
    picture = (t >= begin) & (t < begin + rows * columns)
    text = torch.where(t < begin, t, after)
    axes = [torch.where(picture, begin + extra, text) for extra in (0 * inside, inside // columns, inside % columns)]
    return torch.stack(axes)[:, None].expand(-1, ids.shape[0], -1)


class Seeing:
    def __init__(self, source: Path, device: str):
        self.device, self.dtype = device, torch.bfloat16 if device == "cuda" else torch.float32
        self.text = build().to(device)
        self.text.load_state_dict({n: w.to(device) for n, w in unpacked(source).items()})
        self.text.to(self.dtype).eval().requires_grad_(False)
        if device == "cuda":
            self.text.set_experts_implementation("grouped_mm")
        self.embedding, self.head = self.text.model.embed_tokens.weight, self.text.lm_head.weight
        self.tower = vision.Tower(float(self.embedding[:3000].float().std())).to(device)

    def hidden(self, ids, features, size):
        """After the text model's last norm, of every row."""
        x = self.embedding[ids.clamp(min=0)]
        x = x.masked_scatter((ids < 0)[..., None], features.to(x.dtype))
        positions = rope_positions(ids, size[0] // 32, size[1] // 32)
        return self.text.model(inputs_embeds=x, position_ids=positions, use_cache=False).last_hidden_state

    def features(self, pictures):
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device == "cuda"):
            return self.tower(pictures)

    def loss(self, batch: Batch, size) -> torch.Tensor:
        rows = self.hidden(batch.ids, self.features(batch.pictures), size)[:, :-1]
        keep = batch.weight[:, 1:] > 0
        logits = (rows[keep] @ self.head.T).float()
        return F.cross_entropy(logits, batch.ids[:, 1:][keep])

    @torch.no_grad()
    def answers(self, batch: Batch, size, limit: int) -> list:
        """Greedy answers, all of the batch's prompts at once: prompts of one length only."""
        length = batch.asked[0][4]
        ids, features = batch.ids[:, :length], self.features(batch.pictures)
        for _ in range(limit):
            logits = self.hidden(ids, features, size)[:, -1] @ self.head.T
            logits[:, ADDRESSABLE:] = -torch.inf
            ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), 1)
            if bool((ids[:, length:] == IDS["<|im_end|>"]).any(1).all()):
                break
        out = []
        for row in ids[:, length:].tolist():
            out.append(row[: row.index(IDS["<|im_end|>"])] if IDS["<|im_end|>"] in row else row)
        return out


def scenes_of(rng: random.Random, count: int, held_out: bool) -> list:
    return [drawings.Scene(rng, held_out) for _ in range(count)]


def train(args, model: Seeing, tokenizer) -> int:
    named = list(model.tower.named_parameters())
    hidden = [p for n, p in named if p.dim() == 2 and "pos_embed" not in n]
    rest = [p for n, p in named if not any(p is h for h in hidden)]
    muon = Muon(hidden, momentum=0.95, weight_decay=0.02)
    adam = torch.optim.AdamW(rest, lr=1.0, betas=(0.9, 0.98), weight_decay=0.0)
    rng, generator = random.Random(args.seed), torch.Generator(device=args.device).manual_seed(args.seed)
    start, recent = time.time(), []
    for step in range(args.steps + 1):
        progress = max(step / args.steps, (time.time() - start) / (60 * args.minutes))
        if progress >= 1:
            break
        size = rng.choice(SIZES)
        batch = Batch(tokenizer, scenes_of(rng, args.batch, False), size, rng, args.device, generator)
        loss = model.loss(batch, size)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for _, p in named], 1.0)
        rate = args.lr * min(1.0, progress / 0.03) * min(1.0, (1 - progress) / 0.6)
        for group in adam.param_groups:
            group["lr"] = rate
        adam.step()
        muon.step(rate)
        for _, p in named:
            p.grad = None
        recent.append(loss.detach())
        if step < 3 or step % args.log == 0:
            print(f"step {step} {100 * progress:.0f}% loss {torch.stack(recent).mean().item():.4f} {time.time() - start:.0f}s", flush=True)
            recent.clear()
    return step


def measure(args, model: Seeing, tokenizer) -> dict:
    """Held-out pairs of colours and things; half of the questions with thinking. Exact answers."""
    rng, generator = random.Random(4711), torch.Generator(device=args.device).manual_seed(4711)
    folder = args.out / "eval_vision"
    folder.mkdir(parents=True, exist_ok=True)
    table, records = defaultdict(lambda: [0, 0]), []
    sizes = sorted(set(SIZES))
    for size in sizes:
        for think in (False, True):
            scenes = scenes_of(rng, max(1, args.eval // (2 * len(sizes))), True)
            batch = Batch(tokenizer, scenes, size, rng, args.device, generator, think)
            by_length = defaultdict(list)
            for i, asked in enumerate(batch.asked):
                by_length[asked[4]].append(i)
            said = {}
            for members in by_length.values():
                said.update(zip(members, model.answers(batch.part(members), size, 40)))
            for i, (kind, question, _, answer, _) in enumerate(batch.asked):
                text = tokenizer.decode(said[i], skip_special_tokens=False).split("</think>")[-1].strip()
                for key in (kind, "thinking" if think else "direct", "all"):
                    table[key][0] += text == answer
                    table[key][1] += 1
                name = f"{len(records):03d}.png"
                (folder / name).write_bytes(drawings.png(batch.pictures[i]))
                records.append({"image": name, "kind": kind, "question": question, "thinking": think, "expect": answer, "said": text})
    shown = [r for r in records if r["kind"] == "describe" and r["said"] == r["expect"]]
    if shown:
        shutil.copyfile(folder / shown[0]["image"], args.out / "drawing.png")
    (folder / "questions.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    write_vectors(records, folder, args.out / "vectors")
    for key, (right, count) in sorted(table.items()):
        print(f"  {key:10s} {right:4d}/{count:4d}  {100 * right / count:.1f} %", flush=True)
    for r in [r for r in records if r["said"] != r["expect"]][:12]:
        print("WRONG", json.dumps(r), flush=True)
    return {k: v for k, v in table.items()}


def write_vectors(records: list, pictures: Path, folder: Path) -> None:
    """Of each kind, direct and with thinking, the first that was answered rightly: pictures and questions.jsonl for the tests."""
    chosen = {}
    for r in records:
        if r["said"] == r["expect"]:
            chosen.setdefault((r["kind"], r["thinking"]), r)
    folder.mkdir(parents=True, exist_ok=True)
    for r in chosen.values():
        shutil.copyfile(pictures / r["image"], folder / r["image"])
    (folder / "questions.jsonl").write_text("".join(json.dumps(r) + "\n" for r in chosen.values()))


def check(model: Seeing) -> None:
    """The tower here, rounded to BF16, against transformers' with the same weights, in float32."""
    weights = vision.rounded(model.tower)
    model.tower.load_state_dict({n: w.float() for n, w in weights.items()})
    theirs = vision.reference(weights)
    pictures = drawings.draw(scenes_of(random.Random(1), 2, False), 128, 192, "cpu", torch.Generator().manual_seed(1))
    own = model.tower.cpu()(pictures)
    grid = torch.tensor([[1, 8, 12]] * 2)
    other = theirs(vision.patches_of(pictures).flatten(0, 1), grid).pooler_output
    other = torch.cat(list(other)) if isinstance(other, (list, tuple)) else other
    error = float((own.flatten(0, 1) - other).norm() / other.norm())
    print(f"tower against transformers: relative difference {error:.2e}")
    if not error < 1e-5:
        raise SystemExit("the towers differ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--source", type=Path, default=Path(__file__).resolve().parents[1] / "models/demo")
    parser.add_argument("--minutes", type=float, default=4.5, help="of training")
    parser.add_argument("--steps", type=int, default=100000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--eval", type=int, default=256, help="held-out pictures")
    parser.add_argument("--log", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    began = time.time()
    model, tokenizer = Seeing(args.source, args.device), Tokenizer.from_file(str(args.source / "tokenizer.json"))
    if args.check:
        return check(model)
    parameters = sum(p.numel() for p in model.tower.parameters())
    print(f"tower: {parameters / 1e6:.2f} M parameters, on {args.device}", flush=True)
    steps = train(args, model, tokenizer)
    weights = vision.rounded(model.tower)
    megabytes = vision.write(model.tower, args.source, args.out)
    model.tower.load_state_dict({n: w.float() for n, w in weights.items()})
    print(f"trained {steps} steps; the tower takes {megabytes:.2f} MB; held-out pictures:", flush=True)
    table = measure(args, model, tokenizer)
    (args.out / "accuracy_vision.json").write_text(json.dumps({"steps": steps, "megabytes": megabytes, "right": table}) + "\n")
    right, count = table["all"]
    print(f"done in {time.time() - began:.0f} s: {right} of {count} right ({100 * right / count:.1f} %)", flush=True)


if __name__ == "__main__":
    main()
