#!/usr/bin/env python3
"""Trains the demo checkpoint from scratch and writes it, quantised to NVFP4, with its measured quality.

    python3 scripts/train_demo.py --out models/demo --bf16 DIR # about 10 minutes on one H100-class GPU
    python3 scripts/train_demo.py --drafters --out models/demo # its drafters, about 2 minutes: mtp/, dflash/

Needs torch, transformers 5.17, tokenizers, safetensors; a GPU is wanted.
All text comes from scripts/demo/; seeds are fixed. --minutes stops the training cleanly at that time.
"""
import argparse
import json
import multiprocessing as mp
import os
import random
import sys
import time
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from demo import chat, drafters, evaluate, export, nvfp4
from demo import tokenizer as demo_tokenizer
from demo.common import JOIN, Ctx, plain
from demo.mix import conversation
from demo.model import build, is_nvfp4
from demo.optim import Muon, is_hidden_matrix
from demo.tokenizer import ADDRESSABLE, IDS

SHARD = 8000  # conversations
BUCKETS = [48, 96, 192, 512]


def encode(tokenizer: Tokenizer, c: dict):
    ids, target = [], []
    for text, is_target in chat.render(c["messages"], c["tools"], c["thinking"]):
        for piece in text.split(JOIN) if is_target else [plain(text)]:
            part = tokenizer.encode(piece).ids
            ids += part
            target += [is_target] * len(part)
    return ids, target


def make_shard(job):
    """One shard of training rows, by bucket: {length: (ids [n, length] uint16, weight class [n, length] uint8)}."""
    seed, tokenizer_file, count, split = job
    tokenizer = Tokenizer.from_file(tokenizer_file)
    ctx = Ctx(seed, split)
    rows = {b: ([], []) for b in BUCKETS}
    for _ in range(count):
        ids, target = encode(tokenizer, conversation(ctx))
        length = next((b for b in BUCKETS if len(ids) <= b), None)
        if length is None:
            continue
        pad = length - len(ids)
        rows[length][0].append(ids + [IDS["<|endoftext|>"]] * pad)
        rows[length][1].append([2 if t else 1 for t in target] + [0] * pad)
    return {b: (np.array(i, np.uint16).reshape(-1, b), np.array(w, np.uint8).reshape(-1, b)) for b, (i, w) in rows.items()}


class Feed:
    """Turns shards, made by other processes, into steps: a list of batches, each of rows of one length."""

    def __init__(self, tokenizer_file: str, budget: int, workers: int, seed: int, size: int = SHARD):
        self.pool = mp.get_context("fork").Pool(workers)
        self.shards = self.pool.imap(make_shard, self.jobs(tokenizer_file, seed, size))
        self.budget, self.rng = budget, np.random.default_rng(seed)

    @staticmethod
    def jobs(tokenizer_file: str, seed: int, size: int):
        return [(seed * 100003 + i, tokenizer_file, size, "train") for i in range(220 * SHARD // size)]

    def steps(self):
        for shard in self.shards:
            batches = []
            for length, (ids, weight) in shard.items():
                order = self.rng.permutation(len(ids))
                for part in np.array_split(order, max(1, round(ids.size / self.budget))):
                    if len(part):
                        batches.append((torch.from_numpy(ids[part].astype(np.int64)), torch.from_numpy(weight[part])))
            for i in self.rng.permutation(len(batches)):
                yield [batches[i]]

    def close(self):
        self.pool.terminate()


def train_tokenizer(folder: Path) -> Tokenizer:
    ctx = Ctx(99, "train")
    texts = []
    for _ in range(40000):
        c = conversation(ctx)
        if c["tools"] and random.Random(len(texts)).random() > 0.3:
            continue
        texts.append("".join(plain(t) if not tgt else t.replace(JOIN, "\n") for t, tgt in chat.render(c["messages"], c["tools"], c["thinking"])))
    tokenizer = demo_tokenizer.train(texts)
    demo_tokenizer.save(tokenizer, folder)
    return tokenizer


def fit_chunks() -> None:
    """transformers' chunked delta rule pads rows to chunks of 64; our short rows fit chunks of 48 without padding."""
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as module

    original = module.torch_chunk_gated_delta_rule

    def chunked(query, *args, **kwargs):
        return original(query, *args, **{**kwargs, "chunk_size": 64 if query.shape[1] % 48 else 48})

    module.torch_chunk_gated_delta_rule = chunked


class Trainer:
    """float32 masters, bfloat16 working weights; in the last part the working NVFP4 weights are quantised (straight-through)."""

    def __init__(self, args, device: str):
        self.args, self.device = args, device
        self.model = build(args.seed).to(device)
        self.model.set_experts_implementation("grouped_mm")
        self.names = [n for n, _ in self.model.named_parameters()]
        self.params = [p for _, p in self.model.named_parameters()]
        self.masters = [torch.nn.Parameter(p.detach().clone().float()) for p in self.params]
        for p in self.params:
            p.data = p.data.to(torch.bfloat16)
        self.by_name = dict(zip(self.names, self.masters))
        self.muon = Muon([m for n, m in zip(self.names, self.masters) if is_hidden_matrix(n)], momentum=0.95, weight_decay=0.05)
        rest = [m for n, m in zip(self.names, self.masters) if not is_hidden_matrix(n)]
        self.adam = torch.optim.AdamW(rest, lr=1.0, betas=(0.9, 0.98), weight_decay=0.0, fused=device == "cuda")
        self.router_logits = []
        for layer in self.model.model.layers:
            layer.mlp.gate.register_forward_hook(lambda _m, _i, out: self.router_logits.append(out[0]))

    def load_working(self, quantised: bool) -> None:
        with torch.no_grad():
            for name, p, m in zip(self.names, self.params, self.masters):
                if quantised and is_nvfp4(name):
                    p.copy_(nvfp4.fake_quant(m, export.group_amax(name, self.by_name)))
                else:
                    p.copy_(m)

    def balance_loss(self, real: torch.Tensor) -> torch.Tensor:
        """Switch-style load balance per layer over real tokens."""
        total, share = 0.0, (real.float() / real.sum()).unsqueeze(1)
        for logits in self.router_logits:
            probs = logits.float().softmax(-1)
            chosen = torch.zeros_like(probs).scatter_(1, probs.topk(4, dim=-1).indices, 1.0)
            total = total + 16 * ((chosen * share).sum(0) / 4 * (probs * share).sum(0)).sum()
        return total / len(self.router_logits)

    def step(self, batches: list, lr: float, quantised: bool) -> float:
        self.load_working(quantised)
        weights = [torch.tensor([0.0, self.args.prompt_weight, 1.0], device=self.device)[w.to(self.device, non_blocking=True).long()] for _, w in batches]
        norm = sum(w[:, 1:].sum() for w in weights)
        answer_loss, answer_count = 0.0, 0.0
        for master in self.masters:
            master.grad = torch.zeros_like(master) if master.grad is None else master.grad.zero_()
        for (ids, _), w in zip(batches, weights):
            ids = ids.to(self.device, non_blocking=True)
            self.router_logits.clear()
            logits = self.model(ids, use_cache=False).logits[:, :-1].float()
            losses = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1), reduction="none").view(ids.shape[0], -1)
            target = w[:, 1:]
            loss = (losses * target).sum() / norm + self.args.balance * self.balance_loss((w > 0).reshape(-1)) / len(batches)
            loss.backward()
            with torch.no_grad():
                answer_loss = answer_loss + (losses * (target == 1.0)).sum()
                answer_count = answer_count + (target == 1.0).sum()
            torch._foreach_add_([m.grad for m in self.masters], [p.grad.float() for p in self.params])
            for p in self.params:
                p.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = lr * self.args.adam_scale
        self.adam.step()
        self.muon.step(lr)
        return answer_loss / answer_count

    def weights(self) -> dict:
        return {n: m.detach() for n, m in zip(self.names, self.masters)}


def schedule(progress: float) -> float:
    """Warm-up, level, then a straight line to zero over the last 45 %."""
    return min(1.0, progress / 0.02) * min(1.0, (1.0 - progress) / 0.45)


def train(args, tokenizer_file: str, device: str) -> Trainer:
    feed = Feed(tokenizer_file, args.tokens, args.workers, args.seed + 1)
    trainer = Trainer(args, device)
    print(f"parameters {sum(m.numel() for m in trainer.masters) / 1e6:.2f} M", flush=True)
    start, tokens, recent = time.time(), 0, []
    for step, batches in enumerate(feed.steps()):
        progress = max(step / args.steps, (time.time() - start) / (60 * args.minutes))
        if progress >= 1.0:
            break
        loss = trainer.step(batches, args.lr * schedule(progress), progress >= args.qat_from)
        recent.append(loss)
        tokens += sum(ids.numel() for ids, _ in batches)
        if step < 3 or step % 100 == 0:
            mean = torch.stack([x.detach() for x in recent]).mean().item()
            recent.clear()
            t = time.time() - start
            print(f"step {step} {100 * progress:.1f}% loss {mean:.4f} {tokens / t / 1e3:.0f}K tok/s {t:.0f}s", flush=True)
    feed.close()
    print(f"trained {step} steps, {tokens / 1e6:.1f} M tokens with padding, {time.time() - start:.0f} s", flush=True)
    return trainer


def measure(args, trainer: Trainer, tokenizer: Tokenizer, records: list, device: str) -> dict:
    """Accuracy and held-out loss of the BF16 weights and of the exported NVFP4 weights, run in bfloat16 on a GPU."""
    model = trainer.model
    model.eval()
    trainer.router_logits = []
    for layer in model.model.layers:
        layer.mlp.gate._forward_hooks.clear()
    ctx = Ctx(815, "eval")
    rows = [encode(tokenizer, conversation(ctx)) for _ in range(args.eval_rows)]
    report = {}
    full = trainer.weights()
    for label, weights in (("BF16", full), ("NVFP4", export.dequantised(full))):
        model.load_state_dict(weights)
        start = time.time()
        table, log = evaluate.run(model, tokenizer, records, device)
        nll = evaluate.held_out_nll(model, rows, device)
        report[label] = {"tasks": table, "nll": nll}
        right, total = sum(r[0] for r in table.values()), sum(r[1] for r in table.values())
        print(f"{label}: {right}/{total} right, held-out answer loss {nll:.4f} ({time.time() - start:.0f} s)", flush=True)
        for task, (ok, n, ok_on, n_on) in table.items():
            print(f"  {task:12s} {ok:3d}/{n:3d}   thinking {ok_on}/{n_on}   direct {ok - ok_on}/{n - n_on}", flush=True)
    for record, text, right in log:
        if not right:
            print("WRONG", json.dumps([record["task"], record["messages"][-1].get("content"), text, record["expect"]], ensure_ascii=False))
    return report


def train_drafters(args, device: str) -> None:
    """Of the checkpoint in args.source, from text that it was not trained with."""
    tokenizer_file = str(args.source / "tokenizer.json")
    tokenizer, ctx = Tokenizer.from_file(tokenizer_file), Ctx(815, "eval")
    feed = Feed(tokenizer_file, args.tokens, args.workers, args.seed + 2, size=500)  # the first ones come soon
    rows = [encode(tokenizer, conversation(ctx)) for _ in range(args.eval_rows)]
    drafters.train(args.source, args.out, feed.steps(), args.minutes, args.steps, args.lr, rows, device)
    feed.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--steps", type=int, default=100000)
    parser.add_argument("--tokens", type=int, default=32768, help="tokens per step, padding included")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--adam-scale", type=float, default=1.0)
    parser.add_argument("--prompt-weight", type=float, default=0.1)
    parser.add_argument("--balance", type=float, default=0.01)
    parser.add_argument("--qat-from", type=float, default=0.6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--per-task", type=int, default=24)
    parser.add_argument("--eval-rows", type=int, default=200)
    parser.add_argument("--bf16", type=Path, help="also write the weights before quantization, as a BF16 checkpoint")
    parser.add_argument("--drafters", action="store_true", help="train the drafters of the checkpoint in --source instead")
    parser.add_argument("--source", type=Path, default=Path(__file__).resolve().parents[1] / "models/demo")
    args = parser.parse_args()

    began = time.time()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    fit_chunks()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.drafters:
        return train_drafters(args, device)
    tokenizer = train_tokenizer(args.out)
    print(f"tokenizer after {time.time() - began:.0f} s", flush=True)
    trainer = train(args, str(args.out / "tokenizer.json"), device)
    export.write(trainer.weights(), args.out)
    if args.bf16:
        export.write_bf16(trainer.weights(), args.bf16, args.out)
    records = evaluate.questions(args.per_task)
    evaluate.save(records, args.out / "eval.jsonl")
    report = measure(args, trainer, tokenizer, records, device)
    (args.out / "accuracy.json").write_text(json.dumps(report) + "\n")
    print(f"done in {time.time() - began:.0f} s; {sum(f.stat().st_size for f in args.out.iterdir()) / 1e6:.2f} MB", flush=True)


if __name__ == "__main__":
    main()
