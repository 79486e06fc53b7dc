"""Arithmetic and unit conversion, with the working written out in the thinking part."""
from fractions import Fraction

from .common import Ctx, Item, NAMES

WORD_NUMBERS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen twenty""".split()

PLACES = ["ones", "tens", "hundreds", "thousands"]


def add_steps(a: int, b: int) -> str:
    if a < 10 and b < 10:
        return f"{a} + {b} = {a + b}."
    out, carry = [], 0
    for i in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**i % 10, b // 10**i % 10
        total = x + y + carry
        text = f"{PLACES[i]}: {x} + {y}" + (f" + {carry}" if carry else "") + f" = {total}"
        carry = total // 10
        out.append(text + (f", write {total % 10} carry 1" if carry else ""))
    return "\n".join(out) + f"\nSo {a} + {b} = {a + b}."


def sub_steps(a: int, b: int) -> str:
    if a < b:
        return f"{b} is bigger than {a}, so the result is negative.\n{sub_steps(b, a)}\nSo {a} - {b} = {a - b}."
    if a < 10:
        return f"{a} - {b} = {a - b}."
    out, borrow = [], 0
    for i in range(len(str(a))):
        x, y = a // 10**i % 10, b // 10**i % 10 + borrow
        note = f" ({y - 1} + 1 borrowed)" if borrow else ""
        borrow = 1 if x < y else 0
        lead = f"{x + 10} - {y} = {x + 10 - y}, borrow 1" if borrow else f"{x} - {y} = {x - y}"
        out.append(f"{PLACES[i]}: {lead}{note}")
    return "\n".join(out) + f"\nSo {a} - {b} = {a - b}."


def mul_steps(a: int, b: int) -> str:
    """Splits the longer factor into its places, then sums up."""
    if a <= 12 and b <= 12:
        return f"{a} × {b} = {a * b}."
    if len(str(a)) < len(str(b)) or (len(str(a)) == len(str(b)) and a < b):
        return f"{a} × {b} = {b} × {a}.\n" + mul_steps(b, a)
    if b > 12:
        tens, ones = b // 10 * 10, b % 10
        if not ones:
            return f"{a} × {b} = {a} × {b // 10} × 10.\n{mul_core(a, b // 10)}\nSo {a} × {b} = {a * b}."
        return (
            f"{a} × {b} = {a} × {tens} + {a} × {ones}.\n{mul_core(a, tens // 10)}\nso {a} × {tens} = {a * tens}.\n"
            f"{mul_core(a, ones)}\n{a * tens} + {a * ones} = {a * b}.\nSo {a} × {b} = {a * b}."
        )
    return mul_core(a, b) + f"\nSo {a} × {b} = {a * b}."


def mul_core(a: int, b: int) -> str:
    if a <= 12 and b <= 12:
        return f"{a} × {b} = {a * b}"
    parts = [a // 10**i % 10 * 10**i for i in reversed(range(len(str(a)))) if a // 10**i % 10]
    out, total = [], 0
    for part in parts:
        out.append(f"{part} × {b} = {part * b}")
        if total:
            out.append(f"{total} + {part * b} = {total + part * b}")
        total += part * b
    return "\n".join(out)


def div_steps(a: int, b: int) -> str:
    if b == 0:
        return "Division by zero is not defined."
    if a <= 12 * b:
        q, r = divmod(a, b)
        return f"{q} × {b} = {q * b}." + (f" {a} - {q * b} = {r} is left over." if r else "")
    out, rest, quotient = [], 0, ""
    for digit in str(a):
        value = rest * 10 + int(digit)
        q, rest = divmod(value, b)
        if quotient or q:
            quotient += str(q)
            out.append(f"{value} ÷ {b} = {q}, rest {rest}")
    return "\n".join(out) + f"\nThe digits are {' '.join(quotient)}, so it is {quotient}" + (f" with {rest} left over." if rest else ".")


FORMS = {
    "+": ["What is {a} + {b}?", "{a} + {b}", "{a}+{b}", "What is {a} plus {b}?", "{a} plus {b}", "Calculate {a} + {b}.", "{a} + {b} =", "{a}+{b}=?",
          "How much is {a} + {b}?", "Add {a} and {b}.", "What's {a}+{b}?", "Compute {a} + {b}", "Can you add {a} and {b}?", "What do you get when you add {a} to {b}?",
          "Sum of {a} and {b}", "What is the sum of {a} and {b}?", "{a} + {b}?", "How much is {a} plus {b}?", "whats {a} plus {b}", "solve {a}+{b}",
          "Please calculate {a} plus {b}.", "Do you know what {a} + {b} is?", "Tell me {a} + {b}.", "what does {a} + {b} equal", "{a} and {b} together", "Work out {a} + {b}.",
          "what is {a}+{b}", "i need {a} + {b}"],
    "-": ["What is {a} - {b}?", "{a} - {b}", "{a}-{b}", "What is {a} minus {b}?", "{a} minus {b}", "Calculate {a} - {b}.", "{a} - {b} =", "{a}-{b}=?",
          "How much is {a} - {b}?", "Subtract {b} from {a}.", "What's {a}-{b}?", "Compute {a} - {b}", "Take {b} away from {a}.", "What is left if I take {b} from {a}?",
          "Difference between {a} and {b}", "What is the difference of {a} and {b}?", "{a} - {b}?", "How much is {a} minus {b}?", "whats {a} minus {b}", "solve {a}-{b}",
          "Please calculate {a} minus {b}.", "Do you know what {a} - {b} is?", "Tell me {a} - {b}.", "what does {a} - {b} equal", "{a} less {b}", "Work out {a} - {b}.",
          "what is {a}-{b}", "i need {a} - {b}"],
    "×": ["What is {a} × {b}?", "{a} × {b}", "{a}*{b}", "What is {a} times {b}?", "{a} times {b}", "Calculate {a} * {b}.", "{a} x {b} =", "{a}*{b}=?",
          "How much is {a} × {b}?", "Multiply {a} by {b}.", "What's {a}*{b}?", "Compute {a} * {b}", "Multiply {a} and {b}", "What do you get when you multiply {a} by {b}?",
          "Product of {a} and {b}", "What is the product of {a} and {b}?", "{a} x {b}?", "How much is {a} times {b}?", "whats {a} times {b}", "solve {a}*{b}",
          "Please calculate {a} times {b}.", "Do you know what {a} x {b} is?", "Tell me {a} * {b}.", "what does {a} × {b} equal", "{a} multiplied by {b}", "Work out {a} × {b}.",
          "what is {a}*{b}", "what is {a} x {b}", "{a}x{b}"],
    "÷": ["What is {a} ÷ {b}?", "{a} ÷ {b}", "{a}/{b}", "What is {a} divided by {b}?", "{a} divided by {b}", "Calculate {a} / {b}.", "{a} / {b} =", "{a}/{b}=?",
          "How much is {a} / {b}?", "Divide {a} by {b}.", "What's {a}/{b}?", "Compute {a} / {b}", "How many times does {b} go into {a}?", "How often does {b} fit into {a}?",
          "Quotient of {a} and {b}", "What is {a} over {b}?", "{a} / {b}?", "How much is {a} divided by {b}?", "whats {a} divided by {b}", "solve {a}/{b}",
          "Please divide {a} by {b}.", "Do you know what {a} / {b} is?", "Tell me {a} / {b}.", "what does {a} ÷ {b} equal", "{a} : {b}", "Work out {a} / {b}.",
          "what is {a}/{b}", "i need {a} / {b}"],
}  # fmt: skip


def operands(ctx: Ctx, op: str):
    r = ctx.rng.randint
    hard = ctx.think_on and ctx.chance(0.6)
    if op in "+-":
        top = ctx.choice([10, 20, 100, 1000] if hard or ctx.chance(0.15) else [10, 20, 100])
        a, b = r(0, top), r(0, top)
        if op == "-" and a < b and not ctx.chance(0.1):
            a, b = b, a
        return a, b
    if op == "×":
        if not hard:
            return r(0, 12), r(0, 12)
        return ctx.choice([(r(11, 99), r(2, 12)), (r(2, 9), r(11, 99)), (r(11, 99), r(11, 99)), (r(101, 999), r(2, 9)), (r(0, 12), r(0, 12))])
    b = r(1, 12) if ctx.chance(0.98) else 0
    if b == 0:
        return r(1, 50), 0
    if not hard:
        return b * r(0, 12), b
    b = r(2, 12)
    return (b * r(3, 99), b) if ctx.chance(0.7) else (r(10, 400), b)


def result_of(a: int, op: str, b: int):
    """(text of the result, short, steps, numeric value or None)."""
    if op == "+":
        return str(a + b), add_steps(a, b), a + b
    if op == "-":
        return str(a - b), sub_steps(a, b), a - b
    if op == "×":
        return str(a * b), mul_steps(a, b), a * b
    if b == 0:
        return "", div_steps(a, b), None
    q, rest = divmod(a, b)
    return (f"{q} remainder {rest}" if rest else str(q)), div_steps(a, b), (None if rest else q)


def arithmetic(ctx: Ctx, op: str | None = None) -> Item:
    if op is None and ctx.chance(0.22):
        return ctx.choice([word_problem, word_problem, number_words, compare, parity, percent, half_double, sequence])(ctx)
    op = op or ctx.choice("++--××÷")
    a, b = ctx.draw(lambda: operands(ctx, op), lambda v: f"{v[0]}{op}{v[1]}")
    text, steps, value = result_of(a, op, b)
    answer = f"{a} {op} {b} = {text}." if text else f"{a} ÷ 0 is not defined. You cannot divide by zero."
    facts = {} if value is None else {"number": value}
    return Item("arithmetic", ctx.pick(FORMS[op]).format(a=a, b=b), steps, answer, text or None, facts=facts)


def number_words(ctx: Ctx) -> Item:
    op, word = ctx.choice([("+", "plus"), ("-", "minus"), ("×", "times")])
    a, b = ctx.draw(lambda: (ctx.rng.randint(0, 20), ctx.rng.randint(0, 20)), lambda v: f"{v[0]}{op}{v[1]}")
    if op == "-" and a < b:
        a, b = b, a
    if op == "×":
        a, b = a % 13, b % 13
    q = ctx.pick(["What is {a} {w} {b}?", "{a} {w} {b}", "How much is {a} {w} {b}?", "Can you tell me {a} {w} {b}?", "what's {a} {w} {b}", "calculate {a} {w} {b}", "{a} {w} {b} is?", "{a} {w} {b} equals"])
    text, steps, value = result_of(a, op, b)
    return Item("arithmetic", q.format(a=WORD_NUMBERS[a], b=WORD_NUMBERS[b], w=word), steps, f"{a} {op} {b} = {text}.", text, facts={"number": value})


THINGS = "apples oranges books pens coins marbles cookies eggs stamps cards shells stickers balls candies flowers pencils toys cakes tickets bananas".split()


def word_problem(ctx: Ctx) -> Item:
    n, m, thing = ctx.choice(NAMES), ctx.choice(NAMES), ctx.choice(THINGS)
    kind = ctx.rng.randrange(4)
    a, b = ctx.draw(lambda: (ctx.rng.randint(2, 40), ctx.rng.randint(2, 30)), lambda v: f"{v[0]}w{v[1]}")
    if kind == 0:
        forms = ["{n} has {a} {t} and buys {b} more. How many {t} does {n} have now?", "I have {a} {t} and get {b} more. How many {t} do I have?", "{n} has {a} {t}. {m} gives {n} {b} more. How many {t} does {n} have?",
                 "There are {a} {t} on the table. I put {b} more on it. How many are there?", "If you have {a} {t} and find {b} more, how many do you have?", "{n} has {a} {t} and {m} has {b} {t}. How many {t} do they have together?", "i had {a} {t} and bought {b}, how many now?"]  # fmt: skip
        op = "+"
    elif kind == 1:
        a, b = max(a, b), min(a, b)
        forms = ["{n} has {a} {t} and gives away {b}. How many {t} are left?", "I have {a} {t} and lose {b}. How many {t} do I have?", "{n} has {a} {t} and gives {b} to {m}. How many {t} does {n} have left?",
                 "There are {a} {t} on the table. I take {b}. How many remain?", "If you have {a} {t} and eat {b}, how many do you have?", "Out of {a} {t}, {b} are broken. How many are fine?", "i had {a} {t} and sold {b}, how many left?"]  # fmt: skip
        op = "-"
    elif kind == 2:
        a, b = a % 11 + 2, b % 11 + 2
        forms = ["{n} has {a} boxes with {b} {t} each. How many {t} is that?", "There are {a} bags with {b} {t} in each bag. How many {t} are there?", "If one box holds {b} {t}, how many {t} are in {a} boxes?",
                 "{a} children have {b} {t} each. How many {t} do they have in total?", "I buy {a} packs of {b} {t}. How many {t} do I have?", "{n} buys {a} bags of {b} {t}. How many {t} in total?", "{a} rows of {b} {t}, how many {t}?"]  # fmt: skip
        op = "×"
    else:
        b = b % 9 + 2
        a = (a % 11 + 2) * b
        forms = ["{n} shares {a} {t} among {b} children. How many does each child get?", "{a} {t} are put into {b} boxes. How many {t} are in each box?", "If {b} people share {a} {t}, how many does each one get?",
                 "I split {a} {t} into {b} equal groups. How many are in a group?", "{n} divides {a} {t} equally between {b} friends. How many does each get?", "Share {a} {t} between {b} people.", "{a} {t} for {b} kids, how many each?"]  # fmt: skip
        op = "÷"
    text, steps, value = result_of(a, op, b)
    if op == "÷":
        answer = f"{a} ÷ {b} = {text}, so {text} {thing} each."
    else:
        answer = f"{a} {op} {b} = {text}, so {text} {thing}."
    verb = {"+": "This is an addition", "-": "This is a subtraction", "×": "This is a multiplication", "÷": "This is a division"}[op]
    think = f"{verb}: {a} {op} {b}.\n{steps}"
    return Item("arithmetic", ctx.pick(forms).format(n=n, m=m, t=thing, a=a, b=b), think, answer, text, protect=(thing, n, m), facts={"number": value})


def compare(ctx: Ctx) -> Item:
    top = ctx.choice([20, 100, 1000])
    a, b = ctx.draw(lambda: ctx.rng.sample(range(top), 2), str)
    big = ctx.chance(0.6)
    q = ctx.pick(["Which is {w}, {a} or {b}?", "Which number is {w}: {a} or {b}?", "what is {w}, {a} or {b}", "Is {a} or {b} {w}?", "{a} or {b}, which is {w}?", "Which one is {w}: {b} or {a}?", "Tell me which is {w}: {a} or {b}"])
    x = max(a, b) if big else min(a, b)
    word = ctx.choice(["bigger", "larger", "greater"]) if big else ctx.choice(["smaller", "less"])
    out = "bigger" if big else "smaller"
    y = a + b - x
    return Item("arithmetic", q.format(w=word, a=a, b=b), f"Compare {a} and {b}. {x} is {out}.", f"{x} is {out} than {y}.", str(x))


def parity(ctx: Ctx) -> Item:
    n = ctx.draw(lambda: ctx.rng.randint(0, 999), lambda v: f"p{v}")
    q = ctx.pick(["Is {n} even or odd?", "is {n} odd or even", "Is {n} an even number?", "Is the number {n} even or odd?", "{n}: even or odd?", "Tell me if {n} is even or odd.", "is {n} even"])
    word = "odd" if n % 2 else "even"
    return Item("arithmetic", q.format(n=n), f"The last digit is {n % 10}, which is {word}.", f"{n} is {word}.", word)


def percent(ctx: Ctx) -> Item:
    p = ctx.choice([10, 20, 25, 50, 5, 100, 75])
    base = ctx.draw(lambda: ctx.rng.randint(1, 25) * 20, lambda v: f"{p}%{v}")
    value = base * p // 100
    q = ctx.pick(["What is {p}% of {b}?", "{p}% of {b}", "How much is {p} percent of {b}?", "Calculate {p}% of {b}.", "what's {p} percent of {b}", "{p} percent of {b}?", "whats {p}% of {b}"])
    how = {10: f"10% is a tenth: {base} ÷ 10 = {value}.", 20: f"20% is a fifth: {base} ÷ 5 = {value}.", 25: f"25% is a quarter: {base} ÷ 4 = {value}.", 50: f"50% is a half: {base} ÷ 2 = {value}.",
           5: f"5% is half of a tenth: {base} ÷ 10 = {base // 10}, {base // 10} ÷ 2 = {value}.", 100: f"100% is all of it: {value}.",
           75: f"75% is three quarters: {base} ÷ 4 = {base // 4}, {base // 4} × 3 = {value}."}[p]  # fmt: skip
    return Item("arithmetic", q.format(p=p, b=base), how, f"{p}% of {base} is {value}.", str(value), facts={"number": value})


def half_double(ctx: Ctx) -> Item:
    kind = ctx.rng.randrange(3)
    n = ctx.draw(lambda: ctx.rng.randint(1, 50 if kind != 2 else 12), lambda v: f"h{kind}{v}")
    if kind == 0:
        n *= 2
        q = ctx.pick(["What is half of {n}?", "half of {n}", "What's half of {n}?", "How much is half of {n}?", "Halve {n}.", "Divide {n} in half.", "{n} in half"])
        return Item("arithmetic", q.format(n=n), f"{n} ÷ 2 = {n // 2}.", f"Half of {n} is {n // 2}.", str(n // 2), facts={"number": n // 2})
    if kind == 1:
        q = ctx.pick(["What is double {n}?", "double {n}", "What's twice {n}?", "How much is twice {n}?", "Double the number {n}.", "{n} doubled", "two times {n}"])
        return Item("arithmetic", q.format(n=n), f"{n} × 2 = {n * 2}.", f"Double {n} is {n * 2}.", str(n * 2), facts={"number": n * 2})
    q = ctx.pick(["What is {n} squared?", "{n} squared", "{n}^2", "What is the square of {n}?", "square {n}", "{n} to the power of 2", "how much is {n} squared"])
    return Item("arithmetic", q.format(n=n), f"{n} × {n} = {n * n}.", f"{n} squared is {n * n}.", str(n * n), facts={"number": n * n})


def sequence(ctx: Ctx) -> Item:
    kind = ctx.rng.randrange(2)
    a = ctx.draw(lambda: ctx.rng.randint(0, 40), lambda v: f"s{kind}{v}")
    if kind == 0:
        b = a + ctx.rng.randint(3, 9)
        q = ctx.pick(["Count from {a} to {b}.", "count from {a} to {b}", "Can you count from {a} to {b}?", "List the numbers from {a} to {b}.", "numbers from {a} to {b}", "Count {a} to {b}", "Please count from {a} up to {b}."])
        text = ", ".join(str(i) for i in range(a, b + 1))
        return Item("arithmetic", q.format(a=a, b=b), f"Start at {a} and stop at {b}.", text, None)
    step = ctx.rng.randint(1, 10)
    seq = [a + step * i for i in range(4)]
    q = ctx.pick(["What comes next: {s}?", "{s}, ?", "What is the next number: {s}", "Continue the sequence {s}.", "next number in {s}", "What number follows {s}?", "{s} ... what is next?"])
    nxt = a + 4 * step
    return Item("arithmetic", q.format(s=", ".join(map(str, seq))), f"The step is {step}. {seq[-1]} + {step} = {nxt}.", f"The next number is {nxt}.", str(nxt), facts={"number": nxt})


# name, aliases, (singular, plural)
UNITS = {
    "km": ("kilometer", "kilometers"), "m": ("meter", "meters"), "cm": ("centimeter", "centimeters"), "mm": ("millimeter", "millimeters"),
    "kg": ("kilogram", "kilograms"), "g": ("gram", "grams"), "t": ("ton", "tons"), "l": ("liter", "liters"), "ml": ("milliliter", "milliliters"),
    "h": ("hour", "hours"), "min": ("minute", "minutes"), "s": ("second", "seconds"), "days": ("day", "days"), "weeks": ("week", "weeks"), "years": ("year", "years"),
    "months": ("month", "months"), "ft": ("foot", "feet"), "in": ("inch", "inches"), "yd": ("yard", "yards"), "mi": ("mile", "miles"), "lb": ("pound", "pounds"),
    "oz": ("ounce", "ounces"), "dozen": ("dozen", "dozen"), "pieces": ("piece", "pieces"), "KB": ("kilobyte", "kilobytes"), "MB": ("megabyte", "megabytes"), "GB": ("gigabyte", "gigabytes"),
}  # fmt: skip
FACTORS = [("km", "m", 1000), ("m", "cm", 100), ("cm", "mm", 10), ("m", "mm", 1000), ("kg", "g", 1000), ("t", "kg", 1000), ("l", "ml", 1000), ("h", "min", 60), ("min", "s", 60),
           ("days", "h", 24), ("weeks", "days", 7), ("years", "months", 12), ("ft", "in", 12), ("yd", "ft", 3), ("lb", "oz", 16), ("dozen", "pieces", 12), ("h", "s", 3600), ("MB", "KB", 1000), ("GB", "MB", 1000)]  # fmt: skip
# approximate: unit, unit, factor
APPROX = [("mi", "km", Fraction(8, 5)), ("in", "cm", Fraction(254, 100)), ("kg", "lb", Fraction(22, 10)), ("ft", "cm", Fraction(305, 10))]
UNIT_FORMS = ["How many {B} are in {n} {A}?", "Convert {n} {A} to {B}.", "{n} {A} in {B}", "What is {n} {A} in {B}?", "How many {B} is {n} {A}?", "{n} {A} to {B}", "Change {n} {A} into {B}.", "How much is {n} {A} in {B}?",
              "Can you convert {n} {A} to {B}?", "convert {n}{a} to {b}", "{n} {a} in {b}", "{n}{a} in {b}", "how many {b} in {n} {a}", "{n} {a} to {b}", "What's {n} {a} in {b}?", "I have {n} {A}, how many {B} is that?", "{n} {A} = ? {B}", "{n} {a} = ? {b}",
              "Express {n} {A} in {B}.", "how many {B} are there in {n} {A}", "Turn {n} {A} into {B}"]  # fmt: skip


def number(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.2f}".rstrip("0").rstrip(".")


def named(value, unit: str) -> str:
    return f"{number(Fraction(value))} {UNITS[unit][0 if value == 1 else 1]}"


def scale_steps(n, factor) -> str:
    factor = Fraction(factor)
    if factor.denominator == 1:
        f = factor.numerator
        if f in (10, 100, 1000) or (n <= 12 and f <= 12):
            return f"{n} × {f} = {n * f}."
        return mul_steps(n, f) if f < 1000 else f"{n} × {f} = {n} × 36 × 100.\n{mul_steps(n, 36)}\nSo {n} × {f} = {n * f}."
    whole, part = int(factor), factor - int(factor)
    return f"{n} × {number(factor)} = {n} × {whole} + {n} × {number(part)} = {n * whole} + {number(n * part)} = {number(n * factor)}."


def units(ctx: Ctx) -> Item:
    if ctx.chance(0.15):
        return temperature(ctx)
    if ctx.chance(0.16):
        a, b, factor = ctx.choice(APPROX)
        n = ctx.draw(lambda: ctx.rng.randint(1, 20), lambda v: f"{v}{a}{b}", 8)
        exact = (a, b) == ("in", "cm")
        value = n * factor
        think = f"1 {UNITS[a][0]} is {'' if exact else 'about '}{named(factor, b)}.\n{scale_steps(n, factor)}"
        answer = f"{named(n, a)} {'is' if n == 1 else 'are'} {'' if exact else 'about '}{named(value, b)}."
    else:
        a, b, factor = ctx.choice(FACTORS)
        if ctx.chance(0.6):
            top = 12 if factor in (3600, 24, 60, 16) and not ctx.think_on else (9 if factor == 3600 else 60)
            n = ctx.draw(lambda: ctx.rng.randint(1, top), lambda v: f"{v}{a}{b}")
            think = f"1 {UNITS[a][0]} = {named(factor, b)}.\n{scale_steps(n, factor)}"
            value = Fraction(n * factor)
        else:
            a, b = b, a
            k = ctx.draw(lambda: ctx.rng.randint(1, 20), lambda v: f"{v}{a}{b}")
            n, value = k * factor, Fraction(k)
            if factor in (10, 100, 1000) and ctx.chance(0.4):
                n = ctx.rng.randint(1, 99) * factor // 10
                value = Fraction(n, factor)
            think = f"{named(factor, a)} = 1 {UNITS[b][0]}.\n{n} ÷ {factor} = {number(value)}."
        answer = f"{named(n, a)} {'is' if n == 1 else 'are'} {named(value, b)}."
    q = ctx.pick(UNIT_FORMS).format(n=n, A=UNITS[a][0 if n == 1 else 1], B=UNITS[b][1], a=a, b=b)
    return Item("units", q, think, answer, named(value, b), keep_case=a in ("KB", "MB", "GB"), protect=("min", "mi") + UNITS[a] + UNITS[b])


def temperature(ctx: Ctx) -> Item:
    forms = ["What is {n} degrees {A} in {B}?", "Convert {n}°{a} to {B}.", "{n} {a} to {b}", "{n} degrees {A} in {B}", "{n}°{a} in {b}", "how many degrees {B} is {n} {A}", "Convert {n} {A} to {B}", "{n} {a} in {B}", "What's {n}{a} in {b}?"]
    if ctx.chance(0.6):
        c = ctx.draw(lambda: ctx.choice([ctx.rng.randint(-4, 20) * 5, ctx.rng.randint(0, 40)]), lambda v: f"{v}c", 8)
        f = Fraction(c * 9, 5) + 32
        q = ctx.pick(forms).format(n=c, A="Celsius", B="Fahrenheit", a="C", b="F")
        think = f"F = C × 9 ÷ 5 + 32.\n{c} × 9 = {c * 9}\n{c * 9} ÷ 5 = {number(Fraction(c * 9, 5))}\n{number(Fraction(c * 9, 5))} + 32 = {number(f)}"
        return Item("units", q, think, f"{c}°C is {number(f)}°F.", f"{number(f)}°F")
    c = ctx.draw(lambda: ctx.rng.randint(-4, 20) * 5, lambda v: f"{v}f", 8)
    f = c * 9 // 5 + 32
    q = ctx.pick(forms).format(n=f, A="Fahrenheit", B="Celsius", a="F", b="C")
    think = f"C = (F - 32) × 5 ÷ 9.\n{f} - 32 = {f - 32}\n{f - 32} × 5 = {(f - 32) * 5}\n{(f - 32) * 5} ÷ 9 = {c}"
    return Item("units", q, think, f"{f}°F is {c}°C.", f"{c}°C")
