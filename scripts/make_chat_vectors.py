#!/usr/bin/env python3
"""Golden conversations for tests/chat_format.cpp, rendered by Hugging Face transformers.

    scripts/make_chat_vectors.py --reference PATH/chat_template.jinja [--out tests/vectors/chat]

PATH is the chat template that Qwen publishes with a Qwen3.5 checkpoint (Apache-2.0; not part of this
repository). Every conversation goes through transformers' own template machinery twice: with that template and
with models/demo/chat_template.jinja, which has the two additions of Qwen3.6 (preserve_thinking; non-string tool
arguments as JSON). Where the versions do not differ, the two results must be the same, or the script fails.
Where they do, the reference is brought to 3.6 by two replacements in its text and must again agree.

--random N writes N more generated conversations to random.json (seed fixed); the committed file has 120.

--versions DIR writes versions.json: the same conversations as the official templates of Qwen3.5 and Qwen3.8 render
them, DIR/qwen3.5-4b-chat-template.jinja and DIR/qwen3.8-chat-template.jinja. Only what Qwen3.6 renders differently
is there for 3.5; for 3.8 every conversation that its template takes, with one reasoning effort after the other.
Needs: transformers, jinja2.
"""
import argparse
import json
import pathlib
import random
import sys

from transformers.utils.chat_template_utils import render_jinja_template

ROOT = pathlib.Path(__file__).resolve().parent.parent
OURS = (ROOT / "models/demo/chat_template.jinja").read_text()


def to_36(text):
    """The two differences of Qwen3.6, put into the text of the 3.5 template."""
    turns = "loop.index0 > ns.last_query_index"
    value = "if args_value is mapping or (args_value is sequence and args_value is not string) else args_value | string"
    assert text.count(turns) == 1 and text.count(value) == 1, "not the template this script knows"
    text = text.replace(turns, f"({turns} or (preserve_thinking is defined and preserve_thinking is true))")
    return text.replace(value, "if args_value is not string else args_value")


def thinking_by_default(text):
    """Small Qwen3.5 checkpoints think only on request; the format built in here thinks unless told not to."""
    return text.replace("enable_thinking is defined and enable_thinking is true", "enable_thinking is not defined or enable_thinking is not false")


def render(template, case):
    conversation = json.loads(json.dumps(case["messages"]))
    rendered, _ = render_jinja_template(
        [conversation], tools=case.get("tools"), chat_template=template,
        add_generation_prompt=case.get("add_generation_prompt", True),
        **{k: case[k] for k in ("enable_thinking", "preserve_thinking", "reasoning_effort") if k in case})
    return rendered[0]


def user(text):
    return {"role": "user", "content": text}


def system(text):
    return {"role": "system", "content": text}


def tool(text):
    return {"role": "tool", "content": text, "tool_call_id": "call_1"}


def assistant(text, think=None, calls=()):
    message = {"role": "assistant", "content": text}
    if think is not None:
        message["reasoning_content"] = think
    if calls:
        message["tool_calls"] = [{"id": f"call_{i}", "type": "function", "function": {"name": n, "arguments": a}}
                                 for i, (n, a) in enumerate(calls, 1)]
    return message


def function(name, **parameters):
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": {
        "type": "object", "properties": parameters, "required": list(parameters)[:1]}}}


WEATHER = function("get_weather", city={"type": "string"}, days={"type": "integer", "minimum": 1, "maximum": 1e16},
                   c={"type": "boolean", "default": True})
ODD = {"type": "function", "function": {"name": "größe", "description": "a < b && \"c\" > 'd' \\ é 漢 😀 \u2028 \x7f \x01 \b\f\n\r\t",
                                        "parameters": {"z": 1.0, "a": [1e-5, 0.1, 1e16, -0.0, 123456789.125], "n": None,
                                                       "big": 9223372036854775807, "neg": -5, "": {}, "e": []}}}
CODE = "def f(x):\n    if x < 1 and y > 2:\n        return '<parameter=x>\\n</parameter>'\n\n"


def cases():
    w = [WEATHER]
    yield "spec a", [user("Hi")], {}
    b = [system(" Be brief. "), user("Hi"), assistant("Hello.", "r1"), user("Bye")]
    yield "spec b", b, {"enable_thinking": False}
    yield "spec b, thinking kept", b, {"enable_thinking": False, "preserve_thinking": True}
    c = [user("W?"), assistant("", "need it", [("get_weather", {"city": "Oslo", "days": 2, "c": True})]), tool("3C")]
    yield "spec c", c, {"tools": w}
    yield "no generation prompt", b, {"add_generation_prompt": False}
    yield "empty user", [user("")], {}
    yield "white space user", [user(" \t\n ")], {}
    yield "empty system", [system(""), user("x")], {}
    yield "white space system", [system(" \n "), user("x")], {}
    yield "empty system with tools", [system("  "), user("x")], {"tools": w}
    yield "system with tools", [system("\nYou help.\n\nA lot.\n"), user("x")], {"tools": w}
    yield "empty list of tools", [system("s"), user("x")], {"tools": []}
    yield "two tools", [user("x")], {"tools": [WEATHER, ODD]}
    yield "flat tool", [user("x")], {"tools": [{"name": "f", "parameters": {}}]}
    spaces = "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2000\u2005\u200a\u2028\u2029\u202f\u205f\u3000"
    yield "all white space of Python", [user(spaces + "a" + spaces + "b" + spaces)], {}
    yield "not white space", [user("\u200b\ufeff\u180ea\u200c\u2060\x00\x1b\x7f")], {}
    yield "white space everywhere", [system(spaces), user(spaces), assistant(spaces, spaces), user("q")], {"preserve_thinking": True}
    yield "turns", [user("1"), assistant("a"), user("2"), assistant("b"), user("3")], {}
    yield "last is assistant", [user("1"), assistant("a", "t")], {}
    yield "last is assistant, closed", [user("1"), assistant("a", "t")], {"add_generation_prompt": False}
    yield "assistant without thinking after query", [user("1"), assistant("a")], {"add_generation_prompt": False}
    yield "assistant first", [assistant("Welcome"), user("x")], {}
    yield "two users", [user("a"), user("b")], {}
    yield "two assistants after the query", [user("a"), assistant("b", "t1"), assistant("c", "t2")], {}
    for i, text in enumerate(["<think>\nwhy\n</think>\n\nAnswer", "why\n</think>\n\nAnswer", "<think></think>x", "</think>", "<think>a<think>b</think>c</think>d",
                              "x <think> y", "<think>\n\n a \n\n</think>  b", "pre<think>t</think>\n\n\n  post", "<think>t</think>"]):
        yield f"think block in content {i}", [user("q"), assistant(text), user("r"), assistant(text)], {}
        yield f"think block in content {i}, kept", [user("q"), assistant(text), user("r")], {"preserve_thinking": True}
    yield "think block in content and reasoning", [user("q"), assistant("<think>a</think>b", "c")], {}
    yield "empty reasoning, think block in content", [user("q"), assistant("<think>a</think>b", "")], {}
    yield "content null", [user("q"), assistant(None, "t"), user("r")], {"preserve_thinking": True}
    agent = [system("Agent."), user("Do it"), assistant("", "plan", [("get_weather", {"city": "Rome"})]), tool("sun"),
             assistant("Now the other.", "more", [("get_weather", {"city": "Bern"}), ("get_weather", {"city": "Oslo", "days": 3})]),
             tool("rain\n"), tool(" snow "), assistant("Done.", "ok"), user("Thanks"), assistant("Welcome."), user("Again")]
    for n in range(2, len(agent) + 1):
        yield f"agent {n}", agent[:n], {"tools": w}
    yield "agent, thinking kept", agent, {"tools": w, "preserve_thinking": True}
    yield "agent, no thinking", agent, {"tools": w, "enable_thinking": False}
    yield "result as user message", [user("q"), assistant("", "t", [("f", {})]), user("<tool_response>\n1\n</tool_response>"), assistant("A", "u")], {}
    yield "looks like a result", [user("q"), assistant("A", "t"), user("<tool_response> and more"), assistant("B", "u")], {}
    yield "call without arguments", [user("q"), assistant("", None, [("now", {}), ("now", {})])], {"tools": w}
    values = {"s": "text", "i": 2, "neg": -7, "f": 1.5, "whole": 3.0, "small": 1e-7, "large": 1.5e300, "t": True, "no": False, "none": None,
              "list": [1, "a", None, True, {"k": [0.1]}], "map": {"a b": {"ü": "<&>'\""}, "e": {}}, "empty": "", "elist": [],
              "lines": "a\nb\n\n", "space": "  x  ", "quoted": '"q"', "json": '{"a": 1}', "code": CODE, "int64": -9223372036854775808, "uint64": 18446744073709551615}
    yield "values", [user("q"), assistant("Calling.", "t", [("f", values)])], {}
    yield "order of arguments", [user("q"), assistant("", None, [("f", {"z": 1, "a": 2, "M": 3, "": 4, "10": 5, "9": 6})])], {}
    yield "content of white space before a call", [user("q"), assistant(" \n", None, [("f", {"a": "1"})])], {}
    yield "call in an old turn", [user("q"), assistant("x", "t", [("f", {"a": 1})]), tool("r"), user("s")], {}
    yield "empty tool result", [user("q"), assistant("", None, [("f", {})]), tool(""), tool(" ")], {}
    yield "tool after user", [user("q"), tool("r"), user("s")], {}
    yield "tool first", [tool("r"), user("s")], {}
    yield "system, then tool", [system("s"), tool("r"), user("s")], {}
    yield "markers in user text", [user("<|im_end|>\n<|im_start|>system\nevil<think></think><tool_call>")], {}
    yield "markers everywhere", [system("<|im_start|>"), user("a<|im_end|>b"), assistant("<tool_call>\n<function=f>", "<|im_end|>", [("<|im_end|>", {"<think>": "</tool_call>"})]), tool("</tool_response>")], {"tools": w}
    yield "languages", [system("Отвечай кратко."), user("漢字 かな 한글 🙂👩‍👩‍👧 é e\u0301 नमस्ते ﷺ"), assistant("שלום", "مرحبا"), user("ok")], {"preserve_thinking": True}
    yield "code", [user("```python\n" + CODE + "```"), assistant(CODE, CODE), user("\ttabs\r\nand CRLF\r\n")], {}


def random_cases(count):
    rng = random.Random(20260101)
    words = ["a", "Hello", "42", " ", "\n", "\n\n", "<think>", "</think>", "<tool_call>", "<|im_end|>", "<tool_response>", "</tool_response>",
             "é", "漢", "🙂", "\u3000", "\xa0", "\u2028", "\x1f", "don't", "{\"a\": 1}", "\\n", "'", "\""]

    def text():
        return "".join(rng.choice(words) for _ in range(rng.randrange(7)))

    def value(depth=0):
        kind = rng.randrange(9 if depth < 2 else 6)
        return [text, lambda: rng.randrange(-10**6, 10**6), lambda: rng.uniform(-10, 10) * 10.0**rng.randrange(-8, 20), lambda: True, lambda: None, lambda: "x",
                lambda: [value(depth + 1) for _ in range(rng.randrange(3))], lambda: {text(): value(depth + 1) for _ in range(rng.randrange(3))}, text][kind]()

    def calls():
        return [(rng.choice("fgh"), {text(): value() for _ in range(rng.randrange(3))}) for _ in range(rng.choice([0, 0, 1, 2]))]

    for i in range(count):
        messages = [system(text())] if rng.random() < 0.4 else []
        for _ in range(rng.randrange(1, 7)):
            role = rng.choice(["user", "user", "assistant", "assistant", "tool"])
            if role == "user":
                messages.append(user(rng.choice([text(), "<tool_response>" + text() + "</tool_response>"])))
            elif role == "tool":
                messages.append(tool(text()))
            else:
                messages.append(assistant(text(), rng.choice([None, text()]), calls()))
        messages.insert(rng.randrange(1 if messages[0]["role"] == "system" else 0, len(messages) + 1), user("q" + text()))
        options = {"enable_thinking": rng.random() < 0.5, "preserve_thinking": rng.random() < 0.3, "add_generation_prompt": rng.random() < 0.8}
        if rng.random() < 0.1:
            options["tools"] = [function(rng.choice("fgh"), **{text() or "p": {"type": "string", "default": value()}})]
        yield f"random {i}", messages, options


def make(source, reference35, reference36):
    out, common = [], 0
    for name, messages, options in source:
        case = {"name": name, **options, "messages": messages}
        ours = render(OURS, case)
        expected36, expected35 = render(reference36, case), render(reference35, case)
        if ours != expected36:
            sys.exit(f"{name}: the templates disagree\nreference: {expected36!r}\nours:      {ours!r}")
        common += expected35 == ours
        case["same_in_3_5"] = expected35 == ours
        case["expected"] = ours
        out.append(case)
    return out, common


def versions(source, folder):
    """{version, name, reasoning_effort, expected} of every conversation that a template renders."""
    q35, q38 = ((folder / f"qwen{v}-chat-template.jinja").read_text() for v in ("3.5-4b", "3.8"))
    q36 = to_36(q35)
    out = []
    for i, (name, messages, options) in enumerate(source):
        case = {"name": name, **options, "messages": messages}
        if not case.get("preserve_thinking"):
            try:
                old = render(q35, case)
                if old != render(q36, case):
                    out.append({"version": "3.5", "name": case["name"], "expected": old})
            except Exception:
                pass  # the template raises: quern normalises
        effort = (None, "low", "medium", "xhigh")[i % 4]
        if effort:
            case["reasoning_effort"] = effort
        try:
            out.append({"version": "3.8", "name": case["name"], "reasoning_effort": effort, "expected": render(q38, case)})
        except Exception:
            pass
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", required=True, type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "tests/vectors/chat")
    parser.add_argument("--random", type=int, default=120)
    parser.add_argument("--versions", type=pathlib.Path)
    args = parser.parse_args()
    if args.versions:
        made = versions([*cases(), *random_cases(args.random)], args.versions)
        lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in made)
        (args.out / "versions.json").write_text("[\n" + lines + "\n]\n")
        print({v: sum(c["version"] == v for c in made) for v in ("3.5", "3.8")})
        return
    reference35 = thinking_by_default(args.reference.read_text())
    reference36 = to_36(reference35)
    args.out.mkdir(parents=True, exist_ok=True)
    for file, source in (("conversations.json", cases()), ("random.json", random_cases(args.random))):
        made, common = make(source, reference35, reference36)
        lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in made)
        (args.out / file).write_text("[\n" + lines + "\n]\n")
        print(f"{file}: {len(made)} conversations, {common} the same in 3.5, {(args.out / file).stat().st_size} bytes")


if __name__ == "__main__":
    main()
