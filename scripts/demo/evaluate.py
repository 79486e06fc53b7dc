"""Held-out questions: exact answers by greedy decoding, and the mean loss on the reference answers."""
import math

import torch
import torch.nn.functional as F

from .chat import body_of, prompt_text
from .common import JOIN, Ctx
from .mix import conversation
from .text import encode

TASKS = ["arithmetic", "units", "definitions", "capitals", "strings", "json", "quern", "chat", "refusal", "calendar",
         "multi-turn", "system", "tools"]  # fmt: skip


def make_items(per_task: int, seed: int = 99) -> list:
    items = []
    ctx = Ctx(seed, "eval")
    for task in TASKS:
        seen = set()
        for _ in range(per_task * 30):
            if len(seen) == per_task:
                break
            c = conversation(ctx, task)
            messages = [{k: v for k, v in m.items()} for m in c["messages"][:-1]]
            for m in messages:
                m["content"] = m.get("content", "").replace(JOIN, "")
                m["think"] = m.get("think", "").replace(JOIN, "")
            key = str(messages)
            if key in seen:
                continue
            seen.add(key)
            items.append({"task": task, "messages": messages, "tools": c["tools"], "thinking": c["thinking"],
                          "expected": body_of(c["messages"][-1]).replace(JOIN, ""), "full": c})  # fmt: skip
    return items


def prompt_ids(tokenizer, item: dict) -> list:
    text = prompt_text(item["messages"], item["tools"], item["thinking"])
    return tokenizer.encode(text, add_special_tokens=False).ids


@torch.no_grad()
def generate(model, prompts: list, stop: set, pad: int, limit: int, device) -> list:
    """Greedy continuations, all prompts in one batch padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=limit, do_sample=False,
                         eos_token_id=sorted(stop), pad_token_id=pad)  # fmt: skip
    answers = []
    for row in out[:, width:].tolist():
        end = next((i for i, t in enumerate(row) if t in stop), len(row))
        answers.append(row[:end])
    return answers


def answer_of(text: str, thinking: bool) -> str:
    """What is left of a generated text after its thinking."""
    if not thinking:
        return text.strip()
    return text.split("</think>", 1)[1].strip() if "</think>" in text else ""


def accuracy(model, tokenizer, items: list, stop: set, pad: int, device, batch: int = 256) -> tuple:
    order = sorted(range(len(items)), key=lambda i: len(prompt_ids(tokenizer, items[i])))
    answers = [""] * len(items)
    for at in range(0, len(order), batch):
        part = order[at : at + batch]
        prompts = [prompt_ids(tokenizer, items[i]) for i in part]
        for i, ids in zip(part, generate(model, prompts, stop, pad, 200, device)):
            answers[i] = answer_of(tokenizer.decode(ids, skip_special_tokens=True), items[i]["thinking"])
    right, total = {}, {}
    for item, answer in zip(items, answers):
        total[item["task"]] = total.get(item["task"], 0) + 1
        right[item["task"]] = right.get(item["task"], 0) + (answer == item["expected"])
    return {t: (right[t], total[t]) for t in total}, answers


@torch.no_grad()
def perplexity(model, tokenizer, items: list, device) -> float:
    loss, count = 0.0, 0
    for item in items:
        ids, targets = encode(tokenizer, item["full"])
        row = torch.tensor([ids], device=device)
        hidden = model.model.language_model(input_ids=row, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden)[0, :-1].float()
        wanted = torch.tensor(targets[1:], device=device, dtype=torch.bool)
        loss += F.cross_entropy(logits[wanted], row[0, 1:][wanted], reduction="sum").item()
        count += int(wanted.sum())
    return math.exp(loss / count)
