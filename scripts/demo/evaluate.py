"""Held-out questions, greedy answers, exact match."""
import json
from collections import defaultdict

import torch

from . import chat
from .common import Ctx, plain
from .mix import conversation
from .tokenizer import ADDRESSABLE, IDS

TASKS = "arithmetic units definitions capitals strings json tools quern chat calendar refusal system multi-turn".split()


def questions(per_task: int, seed: int = 4711) -> list:
    """{task, messages, tools, thinking, expect}: `messages` ends before the turn that is asked for."""
    ctx, out = Ctx(seed, "eval"), []
    for task in TASKS:
        for i in range(per_task):
            while True:
                c = conversation(ctx, task)
                if c["thinking"] == (i % 2 == 0):
                    break
            messages = c["messages"]
            answers = [k for k, m in enumerate(messages) if m["role"] == "assistant"]
            # A tool chat asks either for the call or for the sentence that follows its result.
            last = answers[i // 2 % 2] if task == "tools" and len(answers) > 1 else answers[-1]
            record = {"task": task, "thinking": c["thinking"], "messages": strip(messages[:last]), "expect": plain(chat.body_of(messages[last]))}
            if c["tools"]:
                record["tools"] = c["tools"]
            out.append(record)
    return out


def strip(messages: list) -> list:
    """Without our private marks; thinking is kept as reasoning_content where the format would show it."""
    out = []
    for m in messages:
        m = {k: plain(v) if isinstance(v, str) else v for k, v in m.items()}
        if m["role"] == "assistant":
            think = m.pop("think", "")
            if m.get("tool_calls"):
                m["reasoning_content"] = think
                m["tool_calls"] = [{"type": "function", "function": c} for c in m["tool_calls"]]
        out.append(m)
    return out


def prompt_of(record: dict) -> str:
    messages = []
    for m in record["messages"]:
        m = dict(m)
        if m["role"] == "assistant":
            m["think"] = m.pop("reasoning_content", "")
            m["tool_calls"] = [c["function"] for c in m.get("tool_calls", [])]
        messages.append(m)
    return chat.prompt_text(messages, record.get("tools"), record["thinking"])


def answer_of(text: str, thinking: bool) -> str:
    if thinking:
        if "</think>" not in text:
            return "(no answer)"
        text = text.split("</think>", 1)[1]
    return text.strip()


@torch.no_grad()
def greedy(model, prompts: list, limit: int, device: str) -> list:
    """Generated ids per prompt. Left padding is exact here: padded inputs leave the recurrent state at zero."""
    stop = [IDS["<|im_end|>"], IDS["<|endoftext|>"]]
    width = max(map(len, prompts))
    ids = torch.tensor([[IDS["<|endoftext|>"]] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=limit, do_sample=False, eos_token_id=stop, pad_token_id=stop[1], suppress_tokens=list(range(ADDRESSABLE, model.config.vocab_size)))
    answers = []
    for row in out[:, width:].tolist():
        cut = next((i for i, t in enumerate(row) if t in stop), len(row))
        answers.append((row[:cut], cut < len(row)))
    return answers


def run(model, tokenizer, records: list, device: str, limit: int = 220, batch: int = 256) -> tuple:
    """({task: [right, total, right with thinking, total with thinking]}, [(record, text, right)])."""
    table, log = defaultdict(lambda: [0, 0, 0, 0]), []
    order = sorted(range(len(records)), key=lambda i: len(prompt_of(records[i])))
    for start in range(0, len(order), batch):
        part = [records[i] for i in order[start : start + batch]]
        results = greedy(model, [tokenizer.encode(prompt_of(r)).ids for r in part], limit, device)
        for record, (ids, ended) in zip(part, results):
            text = tokenizer.decode(ids, skip_special_tokens=False)
            right = ended and answer_of(text, record["thinking"]) == record["expect"]
            row = table[record["task"]]
            row[0] += right
            row[1] += 1
            row[2] += right and record["thinking"]
            row[3] += record["thinking"]
            log.append((record, text, bool(right)))
    return {t: table[t] for t in TASKS if t in table}, log


def save(records: list, path) -> None:
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))


@torch.no_grad()
def held_out_nll(model, rows: list, device: str) -> float:
    """Mean negative log-likelihood of the answer tokens of held-out conversations."""
    total, count = 0.0, 0
    for ids, target in rows:
        x = torch.tensor([ids], device=device)
        logits = model(x, use_cache=False).logits[0, :-1].float()
        logits[:, ADDRESSABLE:] = float("-inf")
        losses = torch.nn.functional.cross_entropy(logits, x[0, 1:], reduction="none")
        keep = torch.tensor(target[1:], device=device, dtype=torch.bool)
        total += losses[keep].sum().item()
        count += int(keep.sum())
    return total / max(count, 1)
