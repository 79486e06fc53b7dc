"""Word definitions (a closed list) and small string tasks that spell words out."""
from .common import WORDS, Ctx, Item, letters, read_table

DEFINITIONS = {}
for row in read_table("definitions.txt"):
    kind_word, meaning = row
    kind, word = kind_word.split(" ", 1)
    DEFINITIONS[word] = (kind, meaning)

ALL_WORDS = sorted(set(WORDS["noun"] + WORDS["verb"] + WORDS["adj"] + list(DEFINITIONS)))
UNKNOWN_WORDS = [w for w in ALL_WORDS if w not in DEFINITIONS]
DEFINE_FORMS = ["What does {w} mean?", "Define {w}.", "define {w}", "What is the meaning of {w}?", "What is the definition of {w}?", "meaning of {w}", "{w} definition", "Explain the word {w}.", 'What does "{w}" mean?', 'Define "{w}".',
                "What does the word {w} mean?", "Can you define {w}?", "Give me a definition of {w}.", "what is meant by {w}", "Do you know what {w} means?", "Tell me what {w} means.", "What's the meaning of {w}?", "define the word {w}", "{w} meaning", "definition of {w}",
                "Please define the word {w}.", "I don't know the word {w}. What does it mean?", "explain {w}", "whats {w} mean", 'What is the meaning of the word "{w}"?', "{w}: what does it mean?", "How would you define {w}?", "Could you explain what {w} means?"]  # fmt: skip
NOUN_FORMS = ["What is {x}?", "what's {x}?", "What is {x}", "Tell me what {x} is.", "do you know what {x} is", "Explain what {x} is.", "what exactly is {x}", "Can you tell me what {x} is?", "whats {x}", "So what is {x}?"]


def article(word: str) -> str:
    return ("an " if word[0] in "aeiou" and not word.startswith(("uni", "eu", "use")) or word.startswith("hour") or word.startswith("honest") else "a ") + word


def definition_text(word: str) -> str:
    kind, meaning = DEFINITIONS[word]
    if kind == "n":
        one_of_a_kind = word in ("sun", "moon", "sky", "internet")
        head = f"the {word}" if one_of_a_kind else article(word)
        return f"{head[0].upper()}{head[1:]} is {meaning}."
    if kind == "m":
        return f"{word.capitalize()} is {meaning}."
    if kind == "v":
        return f"To {word} means to {meaning}."
    return f"{word.capitalize()} means {meaning}."


def definition(ctx: Ctx, word: str | None = None) -> Item:
    word = word or ctx.choice(list(DEFINITIONS))
    kind, meaning = DEFINITIONS[word]
    if kind in "nm" and ctx.chance(0.35):
        x = word if kind == "m" else ("the " + word if word in ("sun", "moon", "sky", "internet") else article(word))
        question = ctx.pick(NOUN_FORMS).format(x=x)
    else:
        question = ctx.pick(DEFINE_FORMS).format(w=word if kind != "v" or ctx.chance(0.7) else "to " + word)
    role = {"n": "a noun", "m": "a noun", "v": "a verb", "a": "a describing word"}[kind]
    think = f'The user asks what "{word}" means. It is {role} and I know it.'
    return Item("definitions", question, think, definition_text(word), meaning, protect=(word,), facts={"word": word})


def unknown_word(ctx: Ctx) -> Item:
    word = ctx.draw(lambda: ctx.choice(UNKNOWN_WORDS) if ctx.chance(0.75) else nonsense(ctx), one_in=8)
    question = ctx.pick(DEFINE_FORMS).format(w=word)
    if ctx.chance(0.2):
        question = ctx.pick(NOUN_FORMS).format(x=article(word))
    return Item("refusal", question, f'The word "{word}" is not in my small list of definitions.', UNKNOWN_ANSWER, None, protect=(word,), facts={"word": word})


UNKNOWN_ANSWER = "Sorry, that word is not in my small dictionary. I know a few hundred common words, for example river, camera or honest."


def nonsense(ctx: Ctx) -> str:
    return "".join(ctx.choice("bcdfghklmnprstvwz") + ctx.choice("aeiou") for _ in range(ctx.rng.randint(2, 3))) + ctx.choice(["", "n", "r", "x", "k"])


def any_word(ctx: Ctx) -> str:
    if ctx.chance(0.08):
        return nonsense(ctx)
    return ctx.choice(ALL_WORDS)


def quoted(ctx: Ctx, word: str) -> str:
    style = ctx.rng.randrange(6)
    if style == 0:
        return f'"{word}"'
    if style == 1:
        return f"'{word}'"
    if style == 2:
        return f"the word {word}"
    if style == 3:
        return f'the word "{word}"'
    return word


def spaced(word: str) -> str:
    return " ".join(word)


FORMS = {
    "reverse": ["Reverse {w}.", "reverse {w}", "Spell {w} backwards.", "Write {w} backwards.", "What is {w} backwards?", "Can you reverse {w}?", "Please reverse {w}.", "{w} backwards", "Reverse the letters of {w}.", "What is {w} spelled backwards?", "turn {w} around", "reverse: {w}", "Give me {w} in reverse.", "how do you write {w} backwards"],
    "upper": ["Write {w} in uppercase.", "uppercase {w}", "{w} in capital letters", "Make {w} uppercase.", "Convert {w} to uppercase.", "Put {w} in capitals.", "Write {w} in capital letters.", "Can you write {w} in upper case?", "capitalize all letters of {w}", "{w} in caps", "to upper case: {w}", "{w} in upper case please"],
    "lower": ["Write {u} in lowercase.", "lowercase {u}", "{u} in small letters", "Make {u} lowercase.", "Convert {u} to lowercase.", "Write {u} in small letters.", "Can you write {u} in lower case?", "{u} in lower case", "to lower case: {u}", "make {u} lower case please"],
    "count": ["How many letters are in {w}?", "How many letters does {w} have?", "Count the letters in {w}.", "how many letters in {w}", "number of letters in {w}", "How long is {w}?", "What is the length of {w}?", "count letters of {w}", "letter count of {w}", "Tell me how many letters {w} has.", "How many characters are in {w}?", "Can you count the letters in {w}?"],
    "count_of": ["How many {c}'s are in {w}?", "How many times does {c} appear in {w}?", "How often is {c} in {w}?", "Count the letter {c} in {w}.", "how many {c} in {w}", "how many {c}s are in {w}", "Number of {c} in {w}", "How many {c} are there in {w}?", 'How many "{c}" are in {w}?', "How many times is the letter {c} in {w}?", "how many letter {c} in {w}", "Count the {c}s in {w}", "How many {c}’s does {w} have?"],
    "first": ["What is the first letter of {w}?", "first letter of {w}", "Which letter does {w} start with?", "What letter does {w} begin with?", "{w} starts with which letter?", "Tell me the first letter of {w}.", "What's the first letter in {w}?", "give me the first letter of {w}"],
    "last": ["What is the last letter of {w}?", "last letter of {w}", "Which letter does {w} end with?", "What letter does {w} end in?", "{w} ends with which letter?", "Tell me the last letter of {w}.", "What's the last letter in {w}?", "give me the last letter of {w}"],
    "spell": ["Spell {w}.", "spell {w}", "How do you spell {w}?", "Can you spell {w}?", "Spell out {w}.", "spell {w} for me", "How is {w} spelled?", "Please spell {w}.", "spelling of {w}", "Write {w} letter by letter."],
    "sort": ["Sort the letters of {w}.", "sort {w} alphabetically", "Put the letters of {w} in alphabetical order.", "Order the letters in {w}.", "Sort the letters in {w} alphabetically.", "alphabetical order of the letters in {w}", "Arrange the letters of {w} from a to z.", "sort letters: {w}", "letters of {w} sorted"],
    "vowels": ["How many vowels are in {w}?", "how many vowels does {w} have", "Count the vowels in {w}.", "number of vowels in {w}", "vowels in {w}", "Tell me how many vowels {w} has.", "How many vowels are there in {w}?", "Which vowels are in {w}?"],
    "repeat": ["Repeat {w} {n} times.", "Write {w} {n} times.", "say {w} {n} times", "Say {w} {n} times.", "repeat {w} {n} times please", "Can you say {w} {n} times?", "write {w} {n}x", "{w}, {n} times"],
    "echo": ["Say {w}.", "say {w}", "Repeat after me: {w}", "Repeat {w}", "Echo {w}.", "Please say {w}.", "write {w}", "Just say {w}."],
}  # fmt: skip
STRING_KINDS = ["reverse"] * 5 + ["upper"] * 3 + ["lower", "count", "count", "count", "count_of", "count_of", "count_of", "first", "last", "spell", "spell", "sort", "sort", "vowels", "repeat", "echo"]
NUMBER_NAMES = {"2": "two", "3": "three", "4": "four", "5": "five"}


def plural(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def string_task(ctx: Ctx, kind: str | None = None, word: str | None = None) -> Item:
    if kind is None and ctx.chance(0.12):
        return sort_words(ctx)
    kind = kind or ctx.choice(STRING_KINDS)
    word = word or ctx.draw(lambda: any_word(ctx), lambda w: "str" + w)
    think, answer, short, extra = string_answer(ctx, kind, word)
    question = ctx.pick(FORMS[kind]).format(w=quoted(ctx, word), u=word.upper(), **extra)
    return Item("strings", question, think, answer, short, protect=(word, word.upper()), keep_case=kind == "lower", facts={"word": word})


def string_answer(ctx: Ctx, kind: str, word: str):
    spelled = f"{word}: {spaced(word)}"
    extra = {}
    if kind == "reverse":
        out = letters(word[::-1])
        return f"{spelled}\nbackwards: {spaced(word[::-1])}", out, out, extra
    if kind == "upper":
        out = letters(word.upper())
        return f"{spelled}\ncapitals: {spaced(word.upper())}", out, out, extra
    if kind == "lower":
        return f"{word.upper()} in small letters is {word}.", word, word, extra
    if kind == "count":
        listed = " ".join(f"{c}{i + 1}" for i, c in enumerate(word))
        return f"{word}: {listed}", f'"{word}" has {plural(len(word), "letter")}.', str(len(word)), extra
    if kind == "count_of":
        c = ctx.choice(word) if ctx.chance(0.8) else ctx.choice("aeiorst")
        marks, n = [], 0
        for x in word:
            n += x == c
            marks.append(f"{x}({n})" if x == c else x)
        return f"{word}: {' '.join(marks)}", f'The letter {c} appears {plural(n, "time")} in "{word}".', str(n), {"c": c}
    if kind == "first":
        return spelled, f'The first letter of "{word}" is {word[0]}.', word[0], extra
    if kind == "last":
        return spelled, f'The last letter of "{word}" is {word[-1]}.', word[-1], extra
    if kind == "spell":
        return f"I write {word} letter by letter.", "-".join(word), "-".join(word), extra
    if kind == "sort":
        return f"{spelled}\nsorted: {spaced(sorted(word))}", letters("".join(sorted(word))), letters("".join(sorted(word))), extra
    if kind == "vowels":
        found = [x for x in word if x in "aeiou"]
        listing = f" ({', '.join(found)})" if found else ""
        return f"{spelled}\nvowels: {' '.join(found) or 'none'}", f'"{word}" has {plural(len(found), "vowel")}{listing}.', str(len(found)), extra
    if kind == "repeat":
        n = ctx.choice("2345")
        return f"I write {word} {n} times.", " ".join([word] * int(n)), None, {"n": n if ctx.chance(0.6) else NUMBER_NAMES[n]}
    return f"The user wants me to say {word}.", word, None, extra


SORT_FORMS = ["Sort these words: {l}", "Sort alphabetically: {l}", "Put these words in alphabetical order: {l}", "sort {l}", "Sort the words {l}.", "Order these words from a to z: {l}", "alphabetical order: {l}", "Arrange alphabetically: {l}", "Can you sort {l}?", "please sort these: {l}"]


def sort_words(ctx: Ctx) -> Item:
    if ctx.chance(0.35):
        values = ctx.draw(lambda: ctx.rng.sample(range(0, 100), ctx.rng.randint(3, 5)), str)
        down = ctx.chance(0.25)
        how = ctx.pick(["Sort these numbers{d}: {l}", "sort {l}{d}", "Sort the numbers {l}{d}.", "Put {l} in order{d}.", "order these numbers{d}: {l}", "Arrange {l}{d}", "sort numbers{d}: {l}"])
        q = how.format(l=", ".join(map(str, values)), d=ctx.choice([" from largest to smallest", " descending"]) if down else "")
        out = ", ".join(map(str, sorted(values, reverse=down)))
        return Item("strings", q, "I order them " + ("from largest to smallest." if down else "from smallest to largest."), out, out)
    words = ctx.draw(lambda: ctx.rng.sample(ALL_WORDS, 3 if ctx.chance(0.7) else 4), str)
    out = ", ".join(sorted(words))
    firsts = " ".join(sorted(w[0] for w in words))
    return Item("strings", ctx.pick(SORT_FORMS).format(l=", ".join(words)), f"The first letters in order are {firsts}.", out, out, protect=tuple(words))
