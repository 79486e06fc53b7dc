"""Capitals and continents, the calendar, and questions about quern itself."""
from .common import Ctx, Item, read_table

COUNTRIES = read_table("countries.txt")
THE = {"Bahamas", "Comoros", "Dominican Republic", "Gambia", "Maldives", "Netherlands", "Philippines", "Seychelles", "United Arab Emirates", "United Kingdom", "United States"}
ALIAS = {"United States": ["USA", "US", "America", "the USA", "the US", "the United States of America"], "United Kingdom": ["UK", "Great Britain", "the UK", "England", "Britain"], "United Arab Emirates": ["UAE", "the UAE", "the Emirates"],
         "Czechia": ["the Czech Republic", "Czech Republic"], "Ivory Coast": ["Côte d'Ivoire"], "Netherlands": ["Holland"], "Myanmar": ["Burma"], "Turkey": ["Türkiye"]}  # fmt: skip
COMMON = """France Germany Italy Spain Portugal Japan China India Brazil Canada Mexico Australia Egypt Norway Sweden Finland Denmark Poland Russia
Greece Turkey Austria Switzerland Netherlands Belgium Ireland Kenya Nigeria Argentina Chile Peru Thailand Vietnam Indonesia Ukraine Hungary Iceland""".split() + ["United States", "United Kingdom", "South Korea", "South Africa", "New Zealand", "Saudi Arabia"]
COMMON_ROWS = [row for row in COUNTRIES if row[0] in COMMON]
CAPITAL_FORMS = ["What is the capital of {x}?", "capital of {x}", "What's the capital of {x}?", "What is the capital city of {x}?", "Tell me the capital of {x}.", "Which city is the capital of {x}?", "{x} capital", "whats the capital of {x}", "Name the capital of {x}.", "Do you know the capital of {x}?",
                 "the capital of {x} is", "What city is the capital of {x}?", "Can you tell me the capital of {x}?", "capital city of {x}?", "{x}'s capital?", "Give me the capital of {x}.", "Which is the capital of {x}?", "I need the capital of {x}.", "capital {x}", "What is {x}'s capital?", "where is the government of {x}", "capital of {x} please"]  # fmt: skip
COUNTRY_FORMS = ["{c} is the capital of which country?", "Which country has the capital {c}?", "What country is {c} the capital of?", "Of which country is {c} the capital?", "{c} is the capital of what?", "Which country's capital is {c}?", "What country has {c} as its capital?", "In which country is {c}?", "Where is {c}?", "what country is {c} in"]
CONTINENT_FORMS = ["Which continent is {x} in?", "On which continent is {x}?", "What continent is {x} on?", "{x} is on which continent?", "continent of {x}", "where is {x}", "Where in the world is {x}?", "What continent does {x} belong to?", "Is {x} in Europe?", "In which continent is {x}?"]
CHECK_FORMS = ["Is {c} the capital of {x}?", "is {c} the capital of {x}", "Is the capital of {x} {c}?", "{c} is the capital of {x}, right?", "Is it true that {c} is the capital of {x}?", "{c} is the capital of {x}, isn't it?", "the capital of {x} is {c}, correct?", "is {x}'s capital {c}?"]


def shown(ctx: Ctx, country: str) -> str:
    if country in ALIAS and ctx.chance(0.5):
        return ctx.choice(ALIAS[country])
    return ("the " if country in THE and ctx.chance(0.8) else "") + country


def full(country: str) -> str:
    return ("the " if country in THE else "") + country


def row_of(ctx: Ctx):
    return ctx.choice(COMMON_ROWS if ctx.chance(0.3) else COUNTRIES)


def capital(ctx: Ctx, forms=None, row=None) -> Item:
    row = row or row_of(ctx)
    country, city, continent = row
    protect = tuple(city.split()) if ctx.chance(0.8) else ()
    if ctx.chance(0.85):
        protect += tuple(country.split())
    kind = ctx.rng.random()
    upper = lambda s: s[0].upper() + s[1:]
    facts = {"country": country}
    if forms is not None or kind < 0.66:
        q = ctx.pick(forms or CAPITAL_FORMS).format(x=shown(ctx, country))
        return Item("capitals", q, f"The user asks for the capital of {full(country)}. It is {city}.", f"The capital of {full(country)} is {city}".rstrip(".") + ".", city, protect=protect, facts=facts)
    if kind < 0.78:
        q = ctx.pick(COUNTRY_FORMS).format(c=city)
        return Item("capitals", q, f"{city} is the capital of {full(country)}.", f"{city} is the capital of {full(country)}.", country, protect=protect, facts=facts)
    if kind < 0.9:
        q = ctx.pick(CONTINENT_FORMS).format(x=shown(ctx, country))
        answer = f"{upper(full(country))} {'are' if country in ('Bahamas', 'Comoros', 'Maldives', 'Philippines', 'Seychelles') else 'is'} in {continent}."
        if "in Europe" in q or "in europe" in q:
            answer = ("Yes. " if continent == "Europe" else "No. ") + answer
        return Item("capitals", q, f"{upper(full(country))}: the continent is {continent}.", answer, continent, protect=protect, facts=facts)
    right = ctx.chance(0.5)
    city2 = city if right else ctx.choice(COUNTRIES)[1]
    right = city2 == city
    q = ctx.pick(CHECK_FORMS).format(c=city2, x=shown(ctx, country))
    answer = f"{'Yes' if right else 'No'}. The capital of {full(country)} is {city}".rstrip(".") + "."
    return Item("capitals", q, f"The capital of {full(country)} is {city}, so the answer is {'yes' if right else 'no'}.", answer, "Yes" if right else "No", protect=protect + tuple(city2.split()), facts=facts)


DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
LENGTHS = dict(zip(MONTHS, [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]))
ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()
FIXED = [
    (["How many days are in a week?", "how many days does a week have", "days in a week", "how many days in a week?", "How many days has a week?", "number of days in a week"], "A week has 7 days.", "7"),
    (["How many months are in a year?", "how many months does a year have", "months in a year", "how many months in a year?", "How many months has a year?"], "A year has 12 months.", "12"),
    (["How many days are in a year?", "how many days does a year have", "days in a year", "how many days in a year?"], "A year has 365 days, and a leap year has 366.", "365"),
    (["How many hours are in a day?", "how many hours does a day have", "hours in a day", "how many hours in a day?"], "A day has 24 hours.", "24"),
    (["What are the days of the week?", "days of the week", "List the days of the week.", "name the days of the week", "Tell me the seven days of the week."], ", ".join(DAYS) + ".", None),
    (["What are the months of the year?", "months of the year", "List the months.", "name all months", "Tell me the twelve months."], ", ".join(MONTHS) + ".", None),
    (["What are the four seasons?", "seasons of the year", "List the seasons.", "name the seasons", "what seasons are there"], "The four seasons are spring, summer, autumn and winter.", None),
    (["How many letters are in the alphabet?", "how many letters does the alphabet have", "letters in the English alphabet", "number of letters in the alphabet"], "The English alphabet has 26 letters.", "26"),
    (["Say the alphabet.", "What is the alphabet?", "write the alphabet", "list the letters of the alphabet", "alphabet please"], "a b c d e f g h i j k l m n o p q r s t u v w x y z", None),
    (["How many planets are there?", "how many planets does the solar system have", "number of planets", "how many planets in our solar system"], "There are 8 planets in the solar system.", "8"),
    (["Name the planets.", "list the planets", "What are the planets?", "planets of the solar system", "which planets are in the solar system"], "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus and Neptune.", None),
    (["How many continents are there?", "number of continents", "how many continents does the earth have", "list the continents", "name the continents"], "There are 7 continents: Africa, Antarctica, Asia, Europe, North America, South America and Oceania.", "7"),
    (["How many legs does a spider have?", "spider legs number", "how many legs has a spider", "legs of a spider"], "A spider has 8 legs.", "8"),
    (["How many legs does an insect have?", "how many legs has an insect", "how many legs does an ant have"], "An insect has 6 legs.", "6"),
    (["What color is the sky?", "what colour is the sky", "why is the sky... I mean, what color is it?", "color of the sky"], "On a clear day the sky is blue.", "Blue"),
    (["What color is grass?", "what colour is grass", "color of grass", "which color has grass"], "Grass is green.", "Green"),
    (["What color is snow?", "what colour is snow", "color of snow"], "Snow is white.", "White"),
    (["What color is a banana?", "what colour is a banana", "color of bananas"], "A banana is yellow.", "Yellow"),
]  # fmt: skip


def calendar(ctx: Ctx) -> Item:
    kind = ctx.rng.randrange(7)
    step, word = ctx.choice([(1, "after"), (-1, "before")])
    if kind <= 1:
        names, label = (DAYS, "day") if kind == 0 else (MONTHS, "month")
        i = ctx.rng.randrange(len(names))
        out = names[(i + step) % len(names)]
        q = ctx.pick(["What {l} comes {w} {n}?", "What comes {w} {n}?", "which {l} is {w} {n}", "{l} {w} {n}", "What is the {l} {w} {n}?", "Which {l} comes {w} {n}?", "what {l} is {w} {n}", "Tell me the {l} {w} {n}."]).format(l=label, w=word, n=names[i])
        return Item("calendar", q, f"The {label} {word} {names[i]} is {out}.", f"The {label} {word} {names[i]} is {out}.", out, protect=(names[i],))
    if kind == 2:
        month = ctx.choice(MONTHS)
        q = ctx.pick(["How many days does {m} have?", "How many days are in {m}?", "days in {m}", "how many days has {m}", "{m} has how many days?", "number of days in {m}", "How long is {m}?", "Tell me how many days {m} has."]).format(m=month)
        extra = ", and 29 in a leap year" if month == "February" else ""
        return Item("calendar", q, f"{month} has {LENGTHS[month]} days{extra}.", f"{month} has {LENGTHS[month]} days{extra}.", str(LENGTHS[month]), protect=(month,))
    if kind == 3:
        i = ctx.rng.randrange(12)
        q = ctx.pick(["What is the {o} month of the year?", "Which month is number {k}?", "{o} month", "What is month {k}?", "the {o} month of the year", "name the {o} month", "what's the {o} month", "month number {k}"]).format(o=ORDINALS[i], k=i + 1)
        return Item("calendar", q, f"Month {i + 1} is {MONTHS[i]}.", f"The {ORDINALS[i]} month is {MONTHS[i]}.", MONTHS[i])
    if kind == 4:
        i = ctx.rng.randrange(26)
        a = chr(97 + i)
        if not 0 <= i + step < 26:
            step, word = -step, "after" if word == "before" else "before"
        out = chr(97 + i + step)
        q = ctx.pick(["What letter comes {w} {a}?", "Which letter is {w} {a}?", "letter {w} {a}", "What is the letter {w} {a} in the alphabet?", "what comes {w} the letter {a}", "Which letter comes {w} {a} in the alphabet?", "the letter {w} {a}?"]).format(w=word, a=a if ctx.chance(0.6) else a.upper())
        return Item("calendar", q, f"In the alphabet, {out} comes {word} {a}.", f"The letter {word} {a} is {out}.", out, keep_case=True)
    forms, answer, short = ctx.choice(FIXED)
    return Item("calendar", ctx.choice(forms), "I know this: " + answer[0].lower() + answer[1:] if answer[0] not in "MJ" else "I know this list.", answer, short)
