"""What the clients of soak.py ask: plain questions, answers of a random schema, expression or choice, forced tools. Each
request says how its answer must look, streamed or whole."""
import json
import re

NAMES = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta"]


def property_of(rnd):
    """A schema, and a check of its values."""
    return rnd.choice([
        ({"type": "integer"}, lambda v: isinstance(v, int)),
        ({"type": "boolean"}, lambda v: isinstance(v, bool)),
        ({"enum": ["x", "y", rnd.randint(0, 9)]}, lambda v: v in ("x", "y") or isinstance(v, int)),
        ({"type": "string", "maxLength": 8}, lambda v: isinstance(v, str) and len(v) <= 8),
        ({"type": "array", "items": {"type": "boolean"}, "maxItems": 3}, lambda v: isinstance(v, list) and len(v) <= 3),
    ])


def random_schema(rnd):
    names = rnd.sample(NAMES, rnd.randint(1, 3))
    parts = {f"{name}_{rnd.randint(0, 999)}": property_of(rnd) for name in names}
    schema = {"type": "object", "properties": {name: part for name, (part, _) in parts.items()},
              "required": list(parts), "additionalProperties": False}
    return schema, lambda value: set(value) == set(parts) and all(good(value[name]) for name, (_, good) in parts.items())


def plain(rnd, body):
    body["max_tokens"], body["n"] = rnd.randint(1, 60), rnd.choice([1, 1, 1, 2])
    return lambda answer: True


def by_schema(rnd, body):
    schema, good = random_schema(rnd)
    body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return lambda answer: good(json.loads(answer["content"]))


def by_expression(rnd, body):
    pattern = rnd.choice([r"[0-9]{%d}", r"(ab|c){%d}", r"x[a-f]{%d}y"]) % rnd.randint(1, 5)
    body["guided_regex"] = pattern
    return lambda answer: re.fullmatch(pattern, answer["content"]) is not None


def by_choice(rnd, body):
    body["guided_choice"] = choice = [f"{name} {rnd.randint(0, 99)}" for name in rnd.sample(NAMES, 3)]
    return lambda answer: answer["content"] in choice


def forced_tool(rnd, body):
    schema, good = random_schema(rnd)
    name = f"tool_{rnd.randint(0, 999)}"
    body["tools"] = [{"type": "function", "function": {"name": name, "parameters": schema}}]
    body["tool_choice"] = rnd.choice(["required", {"type": "function", "function": {"name": name}}])
    return lambda answer: answer["calls"] and all(n == name and good(json.loads(a)) for n, a in answer["calls"])


def make_request(rnd):
    """A body of /v1/chat/completions, and a check of its reply: None, or what is wrong with it."""
    words = "grain " * (rnd.randint(0, 60) if rnd.random() < 0.95 else 2000)
    body = {"messages": [{"role": "user", "content": f"What is {rnd.randint(1, 99)} + 7? {words}"}],
            "max_tokens": 200, "stream": rnd.random() < 0.5,
            "chat_template_kwargs": {"enable_thinking": rnd.random() < 0.3}}
    good = rnd.choice([plain, plain, plain, by_schema, by_schema, by_expression, by_choice, forced_tool, forced_tool])(rnd, body)
    return body, lambda text: what_is_wrong(text, body, good)


def what_is_wrong(text, body, good):
    try:
        answer = read_stream(text) if body["stream"] else read_whole(text)
        if answer["finish"] == "length" or good(answer):
            return None
    except (ValueError, KeyError, TypeError, IndexError) as error:
        return f"{error!r} in the answer to {json.dumps(body)}: {text[-600:]}"
    return f"not as asked by {json.dumps(body)}: {answer}"


def payload(text):
    """The body of a reply, of chunks or whole."""
    head, _, rest = text.partition("\r\n\r\n")
    if "transfer-encoding: chunked" not in head.lower():
        return rest
    data, whole = rest.encode(), b""
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        whole, data = whole + data[:length], data[length + 2:]
    return whole.decode()


def read_whole(text):
    reply = json.loads(payload(text))
    message = reply["choices"][0]["message"]
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []]
    return {"content": message["content"], "calls": calls, "finish": reply["choices"][0]["finish_reason"]}


def read_stream(text):
    content, calls, finish = "", {}, None
    events = [line[6:] for line in payload(text).splitlines() if line.startswith("data: ")]
    if events[-1] != "[DONE]":
        raise ValueError("no [DONE]")
    for event in map(json.loads, events[:-1]):
        for choice in event["choices"]:
            if choice["index"] != 0:
                continue
            content += choice["delta"].get("content") or ""
            finish = choice["finish_reason"] or finish
            for call in choice["delta"].get("tool_calls") or []:
                name, arguments = calls.get(call["index"], ("", ""))
                function = call["function"]
                calls[call["index"]] = (function.get("name") or name, arguments + (function.get("arguments") or ""))
    return {"content": content, "calls": list(calls.values()), "finish": finish}
