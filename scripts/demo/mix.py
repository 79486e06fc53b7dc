"""Puts questions together to conversations: system prompts, style wishes, follow-ups, several turns."""
from .common import NAMES, Ctx, Exhausted, Item, humanise, letters
from .tasks_chat import REFUSAL, about_quern, refusal, talk
from .tasks_facts import COUNTRIES, calendar, capital, full
from .tasks_math import arithmetic, result_of, units
from .tasks_tools import json_task, to_json, tool_task
from .tasks_words import DEFINITIONS, definition, string_answer, string_task, unknown_word


def out_of_scope(ctx: Ctx) -> Item:
    return unknown_word(ctx) if ctx.chance(0.22) else refusal(ctx)


def without_tool_need(ctx: Ctx) -> Item:
    return ctx.choice([capital, definition, string_task, talk, refusal_safe, units, about_quern])(ctx)


def refusal_safe(ctx: Ctx) -> Item:
    """Out-of-scope questions that the tools at hand cannot help with either."""
    while True:
        item = refusal(ctx)
        if item.answer == REFUSAL:
            return item


SINGLE = [(arithmetic, 20), (units, 10), (definition, 12), (capital, 11), (string_task, 16), (json_task, 6), (about_quern, 7), (talk, 9), (out_of_scope, 16), (calendar, 4)]
KINDS = [make for make, _ in SINGLE]
WEIGHTS = [weight for _, weight in SINGLE]
PLAIN_SYSTEM = ["You are a helpful assistant.", "You are a helpful assistant", "Be helpful.", "You are a friendly assistant.", "Be concise.", "Answer briefly.", "You are quern.", "You are a small demo model.", "Answer the user's questions.", "Keep your answers short.", "You are a precise assistant. Answer briefly.", "You are an assistant in a terminal."]
WORD_SYSTEM = ["Answer in one word.", "Answer with one word only.", "Reply with only the answer.", "Only output the result, nothing else.", "Give only the final answer.", "Answer with the result only.", "Be very brief: give just the answer.", "One word answers only."]
UPPER_SYSTEM = ["Answer in uppercase.", "Write everything in capital letters.", "Answer in capital letters only.", "Always use uppercase letters."]
JSON_SYSTEM = ["Answer in JSON.", "Always answer with a JSON object with the key answer.", "Reply in JSON.", "Respond only in JSON."]
USER_SHORT = [" Answer in one word.", " Just the answer.", " Only the result.", " One word only.", " Only the answer please.", " Give only the answer.", " Short answer.", " (just the answer)"]


def single(ctx: Ctx) -> Item:
    return ctx.rng.choices(KINDS, WEIGHTS)[0](ctx)


def turn(item: Item, user: str, answer: str | None = None) -> list:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": answer or item.answer, "think": item.think}]


def named_system(ctx: Ctx):
    """A system prompt that gives a name, asked for or not."""
    name = ctx.choice(NAMES)
    text = ctx.choice(["Your name is {n}.", "You are {n}.", "You are {n}, a friendly assistant.", "Your name is {n}. Be helpful."]).format(n=name)
    if ctx.chance(0.6):
        q = ctx.pick(["What is your name?", "who are you", "What's your name?", "Who are you?", "your name?", "whats your name", "tell me your name", "how are you called"])
        return text, Item("system", q, f"My name here is {name}.", f"I'm {name}, a tiny demo model that comes with quern.", name)
    return text, single(ctx)


def with_system(ctx: Ctx) -> tuple:
    """(messages, task) of a one-question chat with a system prompt or a style wish in the question."""
    kind = ctx.rng.random()
    if kind < 0.3:
        item = single(ctx)
        return [{"role": "system", "content": ctx.choice(PLAIN_SYSTEM)}] + turn(item, humanise(ctx, item)), "system"
    if kind < 0.42:
        text, item = named_system(ctx)
        return [{"role": "system", "content": text}] + turn(item, humanise(ctx, item)), "system"
    while True:
        item = single(ctx)
        if item.short and (kind < 0.75 or len(item.short) <= 24):
            break
    user = humanise(ctx, item)
    if kind < 0.6:
        return [{"role": "system", "content": ctx.pick(WORD_SYSTEM)}] + turn(item, user, item.short), "system"
    if kind < 0.75:
        return turn(item, user + (ctx.pick(USER_SHORT) if user[-1] in ".?!" else "." + ctx.pick(USER_SHORT)), item.short), "system"
    plain_short = item.short.replace("\ue000", "")
    if kind < 0.88:
        return [{"role": "system", "content": ctx.choice(UPPER_SYSTEM)}] + turn(item, user, letters(plain_short.upper())), "system"
    value = int(plain_short) if plain_short.lstrip("-").isdigit() else plain_short
    return [{"role": "system", "content": ctx.choice(JSON_SYSTEM)}] + turn(item, user, to_json({"answer": value})), "system"


def follow_up(ctx: Ctx, facts: dict) -> Item | None:
    """A question that only makes sense after an earlier one."""
    if "country" in facts:
        row = ctx.choice(COUNTRIES)
        if ctx.chance(0.65):
            q = ctx.pick(["And of {x}?", "and {x}?", "What about {x}?", "and of {x}", "and {x}", "how about {x}?", "What about the capital of {x}?", "And {x}?", "{x}?"]).format(x=full(row[0]))
            return Item("multi-turn", q, f"The user asks for the capital of {full(row[0])}. It is {row[1]}.", f"The capital of {full(row[0])} is {row[1]}".rstrip(".") + ".", row[1], protect=tuple(row[0].split()), facts={"country": row[0]})
        row = next(r for r in COUNTRIES if r[0] == facts["country"])
        q = ctx.pick(["Which continent is it in?", "what continent is that", "On which continent is it?", "And the continent?", "which continent", "where is that?", "Where is it?", "in which continent is that country"])
        verb = "are" if row[0] in ("Bahamas", "Comoros", "Maldives", "Philippines", "Seychelles") else "is"
        head = full(row[0])
        return Item("multi-turn", q, f"It is about {head}. The continent is {row[2]}.", f"{head[0].upper()}{head[1:]} {verb} in {row[2]}.", row[2], facts=facts)
    if "number" in facts:
        a = facts["number"]
        if not 0 <= a <= 999:
            return None
        op = ctx.choice("++-×÷" if a > 1 else "+")
        b = ctx.rng.randint(1, 20) if op in "+-" else ctx.rng.randint(2, 9)
        if op == "÷" and a % b:
            op = "+"
        forms = {"+": ["plus {b}", "And plus {b}?", "add {b} to that", "Now add {b}.", "add {b}", "+ {b}", "plus {b}?", "and if I add {b}?"], "-": ["minus {b}", "And minus {b}?", "subtract {b} from that", "Now subtract {b}.", "take away {b}", "- {b}", "minus {b}?", "and if I take away {b}?"],
                 "×": ["times {b}", "And times {b}?", "multiply that by {b}", "Now multiply by {b}.", "times {b}?", "* {b}", "x {b}", "now times {b}"], "÷": ["divided by {b}", "And divided by {b}?", "divide that by {b}", "Now divide by {b}.", "divided by {b}?", "/ {b}", "divide it by {b}", "now divide by {b}"]}[op]  # fmt: skip
        text, steps, value = result_of(a, op, b)
        return Item("multi-turn", ctx.pick(forms).format(b=b), f"The last result was {a}. Now {a} {op} {b}.\n{steps}", f"{a} {op} {b} = {text}.", text, facts={"number": value})
    if "word" in facts:
        word = facts["word"]
        kind = ctx.choice(["reverse", "upper", "count", "spell", "first", "last", "count"] + (["define"] * 3 if word in DEFINITIONS else []))
        if kind == "define":
            item = definition(ctx, word)
            item.user = ctx.pick(["What does it mean?", "what does that mean", "Define it.", "And what does it mean?", "what does that word mean?", "define that word", "meaning?", "and its meaning?"])
            item.task = "multi-turn"
            return item
        forms = {"reverse": ["Now reverse it.", "reverse it", "and backwards?", "spell it backwards", "Now backwards.", "reverse that word", "Write it backwards.", "now in reverse"], "upper": ["Now in uppercase.", "in capital letters", "make it uppercase", "and in caps?", "Write it in capitals.", "uppercase it", "put it in capital letters", "now uppercase"],
                 "count": ["How many letters does it have?", "how many letters", "And how many letters?", "count its letters", "How long is it?", "How many letters are in it?", "letter count?", "and the number of letters"], "spell": ["Spell it.", "spell it", "How is it spelled?", "spell that", "Now spell it.", "can you spell it", "spell that word", "and how do you spell it"],
                 "first": ["What is its first letter?", "first letter?", "And the first letter?", "which letter does it start with", "the first letter", "What letter does it begin with?", "its first letter", "first letter of it"], "last": ["What is its last letter?", "last letter?", "And the last letter?", "which letter does it end with", "the last letter", "What letter does it end in?", "its last letter", "last letter of it"]}[kind]  # fmt: skip
        think, answer, short, _ = string_answer(ctx, kind, word)
        return Item("multi-turn", ctx.pick(forms), f"The word is {word}.\n{think}", answer, short, facts=facts)
    return None


def name_chat(ctx: Ctx) -> list:
    """The user gives a name and asks for it later, or never gave one."""
    name = ctx.choice(NAMES)
    shown = name if ctx.chance(0.7) else name.lower()
    ask = ctx.pick(["What is my name?", "what's my name", "Who am I?", "do you remember my name", "Do you know my name?", "whats my name?", "tell me my name", "say my name"])
    if ctx.chance(0.2):
        return [{"role": "user", "content": ask}, {"role": "assistant", "content": "You haven't told me your name yet.", "think": "The user has not told me a name."}]
    intro = ctx.pick(["My name is {n}.", "I'm {n}.", "Hi, I'm {n}.", "hello, my name is {n}", "my name is {n}", "i am {n}", "Hello! I am {n}.", "call me {n}", "Hi, my name is {n}"]).format(n=shown)
    messages = [{"role": "user", "content": intro}, {"role": "assistant", "content": f"Nice to meet you, {name}!", "think": f"The user is called {name}. I greet back."}]
    if ctx.chance(0.35):
        return messages
    if ctx.chance(0.5):
        item = single(ctx)
        messages += turn(item, humanise(ctx, item))
    return messages + [{"role": "user", "content": ask}, {"role": "assistant", "content": f"Your name is {name}.", "think": f"The user said the name {name}."}]


def multi_turn(ctx: Ctx) -> list:
    if ctx.chance(0.15):
        return name_chat(ctx)
    messages, facts = [], {}
    for _ in range(ctx.choice([2, 2, 3, 3, 4])):
        item = follow_up(ctx, facts) if facts and ctx.chance(0.65) else None
        if item is None:
            item = single(ctx) if ctx.chance(0.5) else ctx.choice([arithmetic, capital, string_task, definition])(ctx)
        messages += turn(item, humanise(ctx, item))
        facts = item.facts
        if facts.get("number") is None:
            facts.pop("number", None)
    return messages


def conversation(ctx: Ctx, task: str | None = None) -> dict:
    """One training or test conversation: {task, messages, tools, thinking}; it ends with an assistant turn."""
    while True:
        try:
            return compose(ctx, task)
        except Exhausted:
            continue


def compose(ctx: Ctx, task: str | None) -> dict:
    ctx.think_on = ctx.chance(0.55)
    kind = ctx.rng.random()
    tools = None
    if task == "multi-turn" or (task is None and kind < 0.17):
        messages, task = multi_turn(ctx), "multi-turn"
    elif task == "system" or (task is None and kind < 0.27):
        messages, task = with_system(ctx)
    elif task == "tools" or (task is None and kind < 0.36):
        item = tool_task(ctx, without_tool_need)
        tools, task = item.tools, "tools"
        user = humanise(ctx, item)
        messages = turn(item, user) if item.steps is None else [{"role": "user", "content": user}] + item.steps
        if item.steps and ctx.chance(0.25):
            messages = messages[:2]
    else:
        item = single(ctx)
        while task is not None and item.task != task:
            item = single(ctx)
        messages, task = turn(item, humanise(ctx, item)), item.task
    return {"task": task, "messages": messages, "tools": tools, "thinking": ctx.think_on}
