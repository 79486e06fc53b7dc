"""Training: conversations bucketed by length, AdamW, the last part with NVFP4 weights in the forward pass."""
import math
import multiprocessing
import random
import time

import numpy as np
import torch
import torch.nn.functional as F

from .common import Ctx
from .mix import conversation
from .nvfp4 import Quantized
from .text import encode

IGNORE = -100
LONGEST = 1024  # tokens; tool conversations need 400 to 700


def _make_rows(job: tuple) -> list:
    tokenizer, seed, count = job
    ctx, rows = Ctx(seed, "train"), []
    for _ in range(count):
        ids, targets = encode(tokenizer, conversation(ctx))
        if len(ids) <= LONGEST:
            rows.append((np.array(ids, dtype=np.uint16), np.array(targets, dtype=bool)))
    return rows


def make_rows(tokenizer, count: int, seed: int, workers: int) -> list:
    jobs = [(tokenizer, seed * 100003 + i, 2000) for i in range(count // 2000)]
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        return [row for rows in pool.imap(_make_rows, jobs) for row in rows]


def batches(rows: list, tokens: int, seed: int):
    """Endless batches (ids, labels) of about `tokens` tokens, rows of like length together."""
    rng, pad = random.Random(seed), 0
    while True:
        order = sorted(range(len(rows)), key=lambda i: (len(rows[i][0]) + rng.randrange(8)) // 8)
        groups, group, longest = [], [], 0
        for i in order:
            longest = max(longest, len(rows[i][0]))
            if group and longest * (len(group) + 1) > tokens:
                groups.append(group)
                group, longest = [], len(rows[i][0])
            group.append(i)
        rng.shuffle(groups)
        for group in groups:
            width = (max(len(rows[i][0]) for i in group) + 15) // 16 * 16
            ids = torch.full((len(group), width), pad)
            labels = torch.full((len(group), width), IGNORE)
            for r, i in enumerate(group):
                row, targets = rows[i][0].astype(np.int64), rows[i][1]
                ids[r, : len(row)] = torch.from_numpy(row)
                labels[r, : len(row)] = torch.from_numpy(np.where(targets, row, IGNORE))
            yield ids, labels


def decayed(model) -> list:
    matrices = [p for p in model.parameters() if p.ndim >= 2 and p.requires_grad]
    rest = [p for p in model.parameters() if p.ndim < 2 and p.requires_grad]
    return [{"params": matrices, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]


def aux_loss(logits: list, experts: int, used: int) -> torch.Tensor:
    """Load balance over all layers (Switch Transformers): experts * sum(share of tokens * mean probability)."""
    total = 0.0
    for layer in logits:
        p = layer.float().softmax(-1)
        chosen = torch.zeros_like(p).scatter_(1, p.topk(used, dim=-1).indices, 1.0)
        total = total + experts * (chosen.mean(0) / used * p.mean(0)).sum()
    return total / len(logits)


def train(model, rows: list, seconds: float, tokens: int, rate: float, quantized_from: float, seed: int, device) -> dict:
    """Trains for `seconds`; learning rate and the start of the NVFP4 phase follow the time that has passed."""
    quantized = Quantized(model)
    optimizer = torch.optim.AdamW(decayed(model), lr=rate, betas=(0.9, 0.95), eps=1e-8, fused=device.type == "cuda")
    router_logits = []
    for layer in model.model.language_model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, args, out: router_logits.append(out[0]))
    config = model.config.text_config
    begin, step, seen, shown = time.time(), 0, 0, 0.0
    stream = batches(rows, tokens, seed)
    model.train()
    while True:
        done = (time.time() - begin) / seconds
        if done >= 1:
            break
        warm = min(1.0, (step + 1) / 150)
        for group in optimizer.param_groups:
            group["lr"] = rate * warm * (0.5 + 0.5 * math.cos(math.pi * done)) + 1e-5
        ids, labels = (t.to(device, non_blocking=True) for t in next(stream))
        saved = quantized.apply() if done >= quantized_from else []
        router_logits.clear()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            hidden = model.model.language_model(input_ids=ids, use_cache=False).last_hidden_state
            wanted = labels[:, 1:] != IGNORE
            logits = model.lm_head(hidden[:, :-1][wanted])
        loss = F.cross_entropy(logits.float(), labels[:, 1:][wanted])
        balance = aux_loss(router_logits, config.num_experts, config.num_experts_per_tok)
        (loss + 0.01 * balance).backward()
        quantized.restore(saved)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        seen += ids.numel()
        if time.time() - shown > 15:
            shown = time.time()
            print(f"step {step} loss {loss.item():.4f} balance {float(balance):.3f} {'nvfp4 ' if saved else ''}"
                  f"{seen / (time.time() - begin):.0f} tok/s", flush=True)  # fmt: skip
    model.eval()
    return {"steps": step, "tokens": seen, "seconds": time.time() - begin, "loss": loss.item()}
