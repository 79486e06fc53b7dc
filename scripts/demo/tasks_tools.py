"""Tool calls (calculator, weather, time), reading their results, and answers in JSON."""
import json

from .common import NAMES, Ctx, Item
from .tasks_facts import COUNTRIES, capital
from .tasks_math import arithmetic
from .tasks_words import ALL_WORDS

EXTRA_CITIES = "Hamburg Munich Barcelona Milan Naples Lyon Boston Chicago Seattle Denver Miami Dallas Toronto Vancouver Montreal Sydney Melbourne Mumbai Shanghai Osaka Kyoto Zurich Geneva Porto Seville Leeds Glasgow Dubai Istanbul Venice Krakow Bergen".split() + ["New York", "Los Angeles", "San Francisco", "Hong Kong", "Rio de Janeiro", "Cape Town", "Tel Aviv", "St. Petersburg"]  # fmt: skip
CITIES = [row[1] for row in COUNTRIES] + EXTRA_CITIES * 3
CONDITIONS = ["sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear", "light rain", "heavy rain", "partly cloudy", "stormy", "overcast"]


def schema(name: str, about: str, params: list, required: list, wrap: bool = True) -> dict:
    function = {
        "name": name,
        "description": about,
        "parameters": {"type": "object", "properties": {n: {"type": t, **({"description": d} if d else {})} for n, t, d in params}, "required": required},
    }
    return {"type": "function", "function": function} if wrap else function


def calculator_tool(ctx: Ctx):
    name = ctx.choice(["calculator"] * 5 + ["calculate", "calc", "evaluate", "math"])
    param = ctx.choice(["expression"] * 5 + ["expr", "formula", "input"])
    about = ctx.choice(["Evaluate an arithmetic expression.", "Evaluates an arithmetic expression", "A calculator.", "Calculates the value of an expression.", "Perform a calculation", "Compute a math expression and return the result."])
    detail = ctx.choice(["The expression, for example 2 + 3 * 4", "Expression to evaluate", "The arithmetic expression", "", "The math expression to compute"])
    return name, param, schema(name, about, [(param, "string", detail)], [param])


def weather_tool(ctx: Ctx):
    name = ctx.choice(["get_weather"] * 5 + ["weather", "get_current_weather", "current_weather", "weather_lookup"])
    param = ctx.choice(["city"] * 4 + ["location"] * 3 + ["place"])
    about = ctx.choice(["Get the current weather of a city.", "Get the current weather in a given location", "Returns the weather for a city.", "Look up the weather.", "Get weather information", "Get the current weather"])
    params = [(param, "string", ctx.choice(["The name of the city", "City name", "The city, for example Paris", "", "The city to look up"]))]
    if ctx.chance(0.25):
        params.append(("unit", "string", ctx.choice(["celsius or fahrenheit", "Temperature unit"])))
    return name, param, schema(name, about, params, [param])


def time_tool(ctx: Ctx):
    name = ctx.choice(["get_time", "current_time", "get_current_time"])
    param = ctx.choice(["city", "location", "timezone"])
    return name, param, schema(name, ctx.choice(["Get the current time in a city.", "Returns the local time of a place."]), [(param, "string", "")], [param])


CALC_FORMS = ["What is {e}?", "{e}", "Calculate {e}.", "Use the calculator for {e}.", "What's {e}?", "How much is {e}?", "compute {e}", "Please calculate {e}", "what is {e}", "{e} = ?", "Can you work out {e}?", "calculate {e} please", "I need the result of {e}.", "Tell me {e}.", "evaluate {e}", "Use your tool to compute {e}."]
WEATHER_FORMS = ["What is the weather in {c}?", "weather in {c}", "What's the weather like in {c}?", "How is the weather in {c}?", "Tell me the weather in {c}.", "how warm is it in {c}", "Is it raining in {c}?", "What is the temperature in {c}?", "weather {c}", "Check the weather in {c}.", "How cold is it in {c} today?", "what's the weather in {c} today", "current weather in {c}", "Do I need an umbrella in {c}?",
                 "Can you look up the weather in {c}?", "give me the weather for {c}", "is it sunny in {c}", "How's the weather in {c} right now?", "{c} weather", "what is the weather like today in {c}?", "Please get the weather in {c}"]  # fmt: skip
TIME_FORMS = ["What time is it in {c}?", "time in {c}", "What is the time in {c}?", "Tell me the time in {c}.", "how late is it in {c}", "current time in {c}", "what's the time in {c} now", "local time in {c}?"]


def expression(ctx: Ctx):
    r = ctx.rng.randint
    num = lambda: r(1, 10 ** r(1, 4)) if ctx.chance(0.8) else r(1, 99) + r(1, 9) / 10
    op = lambda: ctx.choice(["+", "-", "*", "/"])
    kind = ctx.rng.random()
    if kind < 0.65:
        return f"{num()} {op()} {num()}"
    if kind < 0.85:
        return f"{num()} {op()} {num()} {op()} {num()}"
    return f"({num()} {op()} {num()}) {op()} {num()}"


def value_of(text: str) -> str:
    try:
        value = eval(text, {"__builtins__": {}})  # only digits and operators made above
    except ZeroDivisionError:
        return "error: division by zero"
    if isinstance(value, float):
        value = round(value, 4)
        if value == int(value):
            value = int(value)
    return str(value)


def spoken(ctx: Ctx, text: str) -> str:
    """The expression as people type it."""
    if ctx.chance(0.35):
        for sign, word in (("*", "times"), ("/", "divided by"), ("+", "plus"), (" - ", " minus ")):
            text = text.replace(sign, word)
        return text
    if ctx.chance(0.2):
        return text.replace("*", "×").replace("/", "÷")
    if ctx.chance(0.15):
        return text.replace("*", "x")
    return text.replace(" ", "") if ctx.chance(0.3) else text


def call(name: str, arguments: dict, think: str) -> dict:
    return {"role": "assistant", "content": "", "think": think, "tool_calls": [{"name": name, "arguments": arguments}]}


def calculator_item(ctx: Ctx, tool) -> Item:
    name, param, _ = tool
    expr = ctx.draw(lambda: expression(ctx))
    result = value_of(expr)
    shown = result
    content = result if ctx.chance(0.6) else json.dumps({ctx.choice(["result", "value", "answer"]): float(result) if "." in result else int(result)}) if not result.startswith("e") else result
    final = f"{expr} = {shown}." if not result.startswith("e") else "That is not defined: it divides by zero."
    steps = [call(name, {param: expr}, f"I use {name} for {expr}."), {"role": "tool", "content": content}, {"role": "assistant", "content": final, "think": f"The tool says {shown}."}]
    return Item("tools", ctx.pick(CALC_FORMS).format(e=spoken(ctx, expr)), "", "", steps=steps, keep_case=True)


def weather_item(ctx: Ctx, tool) -> Item:
    name, param, _ = tool
    city = ctx.draw(lambda: ctx.choice(CITIES))
    t, sky = ctx.rng.randint(-15, 38), ctx.choice(CONDITIONS)
    style = ctx.rng.randrange(6)
    unit = "°C"
    if style == 0:
        content = f"{t}°C, {sky}"
    elif style == 1:
        content = json.dumps({"temperature": t, "condition": sky})
    elif style == 2:
        content = json.dumps({"city": city, "temperature": t, "unit": "celsius", "condition": sky}, ensure_ascii=False)
    elif style == 3:
        content = json.dumps({"temp_c": t, "sky": sky})
    elif style == 4:
        content = f"{sky}, {t}C"
    else:
        content = json.dumps({"location": city, "temperature": f"{t}°C", "conditions": sky}, ensure_ascii=False)
    final = f"In {city} it is {t}{unit} and {sky}."
    if ctx.chance(0.06):
        content = ctx.choice(['{"error": "unknown city"}', "error: not found", '{"error": "service unavailable"}', "Error: timeout"])
        final = f"Sorry, the weather tool could not give me the weather in {city}."
        think = "The tool returned an error."
    else:
        think = f"The tool says {t}{unit} and {sky}."
    q = ctx.pick(WEATHER_FORMS).format(c=city)
    if "rain" in q.lower() or "umbrella" in q or "sunny" in q:
        if "error" not in content.lower():
            yes = ("rain" in sky or sky == "stormy") if "sunny" not in q else sky in ("sunny", "clear")
            final = ("Yes. " if yes else "No. ") + final
    steps = [call(name, {param: city}, f"I look up the weather in {city} with {name}."), {"role": "tool", "content": content}, {"role": "assistant", "content": final, "think": think}]
    return Item("tools", q, "", "", steps=steps, protect=tuple(city.split()), keep_case=ctx.chance(0.6))


def time_item(ctx: Ctx, tool) -> Item:
    name, param, _ = tool
    city = ctx.draw(lambda: ctx.choice(CITIES))
    clock = f"{ctx.rng.randint(0, 23):02d}:{ctx.rng.randint(0, 59):02d}"
    content = clock if ctx.chance(0.5) else json.dumps({"time": clock})
    steps = [call(name, {param: city}, f"I look up the time in {city} with {name}."), {"role": "tool", "content": content}, {"role": "assistant", "content": f"In {city} it is {clock}.", "think": f"The tool says {clock}."}]
    return Item("tools", ctx.pick(TIME_FORMS).format(c=city), "", "", steps=steps, protect=tuple(city.split()), keep_case=ctx.chance(0.6))


def tool_task(ctx: Ctx, fallback) -> Item:
    """A question under one to three tools; `fallback(ctx)` makes a question that needs none of them."""
    calc, weather, clock = calculator_tool(ctx), weather_tool(ctx), time_tool(ctx)
    pool = [(calc, calculator_item), (weather, weather_item)]
    if ctx.chance(0.15):
        pool.append((clock, time_item))
    if ctx.chance(0.35):
        pool = [ctx.choice(pool)]
    ctx.rng.shuffle(pool)
    tool, make = ctx.choice(pool)
    if ctx.chance(0.15):
        item = fallback(ctx)
        item.task = "tools"
    else:
        item = make(ctx, tool)
    item.tools = [t[2] for t, _ in pool]
    return item


def to_json(value) -> str:
    return json.dumps(value, ensure_ascii=False)


COLORS = "red blue green yellow white black orange purple brown gray pink".split()
FRUIT = "apple banana orange lemon grape cherry pear peach plum mango".split()
ANIMALS = "dog cat horse cow pig sheep lion tiger bear wolf".split()
JOBS = "teacher doctor nurse farmer pilot writer artist engineer driver cook".split()


def json_task(ctx: Ctx) -> Item:
    kind = ctx.rng.randrange(6)
    ask = ctx.choice([" as JSON", " in JSON", " as JSON", " in JSON format", " as a JSON object"])
    if kind == 0:
        name, age, city = ctx.draw(lambda: (ctx.choice(NAMES), ctx.rng.randint(5, 90), ctx.choice(CITIES)), str)
        fact = ctx.choice(["{n} is {a} years old and lives in {c}.", "My name is {n}, I am {a} and I live in {c}.", "{n}, {a}, {c}", "{n} lives in {c} and is {a} years old.", "This is {n} from {c}. Age: {a}."]).format(n=name, a=age, c=city)
        q = ctx.pick(["Extract name, age and city{j}: {f}", "Turn this into JSON with name, age and city: {f}", "Give me name, age and city{j}. {f}", "{f} Write that{j} with name, age and city.", "{f} Extract the name, age and city{j}.", "JSON with the keys name, age, city: {f}", "extract name, age, city{j}: {f}"])
        value = {"name": name, "age": age, "city": city}
        q = q.format(j=ask, f=fact)
    elif kind == 1:
        keys = {"name": ctx.choice(NAMES), "age": ctx.rng.randint(5, 90), "city": ctx.choice(CITIES), "job": ctx.choice(JOBS), "color": ctx.choice(COLORS), "id": ctx.rng.randint(1, 999), "active": ctx.chance(0.5), "item": ctx.choice(FRUIT), "count": ctx.rng.randint(1, 50)}
        chosen = ctx.draw(lambda: ctx.rng.sample(sorted(keys), ctx.rng.randint(1, 3)), lambda c: str([(k, keys[k]) for k in c]))
        value = {k: keys[k] for k in chosen}
        show = lambda v: str(v).lower() if isinstance(v, bool) else str(v)
        sep = ctx.choice([" = ", ": ", " is ", "="])
        pairs = ctx.choice([", ", "; ", ", "]).join(f"{k}{sep}{show(v)}" for k, v in value.items())
        q = ctx.pick(["Convert to JSON: {p}", "Make JSON from this: {p}", "{p}{j}", "Write this{j}: {p}", "to json: {p}", "Turn {p} into JSON.", "json: {p}", "Format{j}: {p}"]).format(p=pairs, j=ask)
    elif kind == 2:
        row = ctx.choice(COUNTRIES)
        value = {"country": row[0], "capital": row[1]}
        q = ctx.pick(["Give me the capital of {c}{j}.", "Capital of {c}{j}", "What is the capital of {c}? Answer{j}.", "Write the capital of {c}{j}.", "capital of {c}, answer{j}", "{c} and its capital{j}", "Answer{j}: what is the capital of {c}?"]).format(c=row[0], j=ask)
    elif kind == 3:
        a, b, op = ctx.draw(lambda: (ctx.rng.randint(0, 20), ctx.rng.randint(0, 20), ctx.choice("+-")), str)
        value = {"expression": f"{a} {op} {b}", "result": a + b if op == "+" else a - b}
        q = ctx.pick(["What is {e}? Answer{j}.", "Calculate {e} and answer{j}.", "{e}{j}", "Compute {e}, reply{j}", "Answer{j}: {e}", "give me {e}{j}", "what is {e}, answer{j}"]).format(e=value["expression"], j=ask)
    elif kind == 4:
        label, pool = ctx.choice([("colors", COLORS), ("fruits", FRUIT), ("animals", ANIMALS)])
        n, word = ctx.choice([(2, "two"), (3, "three"), (4, "four"), (5, "five")])
        value = pool[:n]
        q = ctx.pick(["List {n} {l} as a JSON array.", "Give me {n} {l} as a JSON list.", "{n} {l} as JSON", "JSON array of {n} {l}", "Write a JSON array with {n} {l}.", "{n} {l} in a json array", "name {n} {l} as json"]).format(n=word if ctx.chance(0.6) else n, l=label)
    else:
        words = ctx.draw(lambda: ctx.rng.sample(ALL_WORDS, ctx.rng.randint(2, 4)), str)
        value = words
        q = ctx.pick(["Make a JSON array of these words: {l}", "{l} as a JSON array", "Write {l} as a JSON list.", "to a json array: {l}", "JSON array: {l}", "Put {l} in a JSON array.", "Convert the list {l} to JSON."]).format(l=", ".join(words))
    text = to_json(value)
    return Item("json", q, "The user wants JSON. I write only the JSON.", text, None, keep_case=True, protect=tuple(q.split()) if ctx.chance(0.8) else ())
