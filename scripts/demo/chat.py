"""The chat format: renders a conversation to (text, is_target) segments, as Qwen3.6's template does."""
import json

TOOL_RULES = """

If you choose to call a function ONLY reply in the following format with NO suffix:

<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>
</tool_call>

<IMPORTANT>
Reminder:
- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested within <tool_call></tool_call> XML tags
- Required parameters MUST be specified
- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT after
- If there is no function call available, answer the question like normal with your current knowledge and do not tell the user about function calls
</IMPORTANT>"""


def render_call(name: str, arguments: dict) -> str:
    parts = [f"<tool_call>\n<function={name}>\n"]
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        parts.append(f"<parameter={key}>\n{text}\n</parameter>\n")
    return "".join(parts) + "</function>\n</tool_call>"


def body_of(message: dict) -> str:
    body = message.get("content", "").strip()
    for i, call in enumerate(message.get("tool_calls", [])):
        gap = "\n" if i else ("\n\n" if body else "")
        body += gap + render_call(call["name"], call["arguments"])
    return body


def system_block(messages: list, tools: list | None) -> str:
    first = messages[0]["content"].strip() if messages[0]["role"] == "system" else None
    if tools:
        listing = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        head = "# Tools\n\nYou have access to the following functions:\n\n<tools>" + listing + "\n</tools>" + TOOL_RULES
        if first:
            head += "\n\n" + first
        return f"<|im_start|>system\n{head}<|im_end|>\n"
    return "" if first is None else f"<|im_start|>system\n{first}<|im_end|>\n"


def render(messages: list, tools: list | None, thinking: bool) -> list:
    """Segments of a whole conversation whose last message is the assistant's. Only the turns that a model would
    really be asked to write under this rendering are targets: those after the last user question."""
    last_query = max(i for i, m in enumerate(messages) if m["role"] == "user")
    segments = [[system_block(messages, tools), False]]

    def add(text: str, target: bool) -> None:
        if segments[-1][1] == target:
            segments[-1][0] += text
        else:
            segments.append([text, target])

    for i, message in enumerate(messages):
        role = message["role"]
        if role == "user":
            add(f"<|im_start|>user\n{message['content'].strip()}<|im_end|>\n", False)
        elif role == "tool":
            if messages[i - 1]["role"] != "tool":
                add("<|im_start|>user", False)
            add(f"\n<tool_response>\n{message['content'].strip()}\n</tool_response>", False)
            if messages[i + 1]["role"] != "tool":
                add("<|im_end|>\n", False)
        elif role == "assistant":
            add("<|im_start|>assistant\n", False)
            target = i > last_query
            if target and thinking:
                add("<think>\n", False)
                add(f"{message['think']}\n</think>\n\n", True)
            elif target:
                add("<think>\n\n</think>\n\n", False)
            add(body_of(message) + "<|im_end|>", target)
            add("\n", False)
    return segments


def prompt_text(messages: list, tools: list | None, thinking: bool) -> str:
    """The prompt that asks for the next assistant turn; earlier turns after the last question keep their thinking."""
    segments = render(messages + [{"role": "assistant", "content": "", "think": ""}], tools, thinking)
    text = "".join(s for s, _ in segments)
    tail = "<think>\n\n</think>\n\n<|im_end|>\n"
    assert text.endswith(tail), text[-80:]
    return text[: -len(tail)] + ("<think>\n" if thinking else "<think>\n\n</think>\n\n")
