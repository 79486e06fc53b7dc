"""Shared pieces of the demo's data generator: the random context, train/eval split, typing noise, word lists."""
import random
import zlib
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent

# Put between characters of an answer, it makes the tokenizer encode them one by one. A byte-level BPE model learns to
# write a reversed word far better letter by letter than in the arbitrary pieces that merging it would give.
JOIN = "\ue000"


def letters(text: str) -> str:
    return JOIN.join(text)


def plain(text: str) -> str:
    return text.replace(JOIN, "")


@dataclass
class Item:
    """One question with its answer. `short` is the bare answer for "one word" style instructions."""

    task: str
    user: str
    think: str
    answer: str
    short: str | None = None
    protect: tuple = ()  # words that typing noise must leave alone
    keep_case: bool = False
    facts: dict = field(default_factory=dict)  # what a follow-up question may refer to
    tools: list | None = None
    steps: list | None = None  # for tool tasks: messages after the first user turn
    noise: bool = True


class Exhausted(Exception):
    """This kind of question has nothing kept for this split: ask another."""


class Ctx:
    """Random source plus the split. Values kept for evaluation (numbers, words, names) never occur in training."""

    def __init__(self, seed: int, split: str):
        self.rng = random.Random(seed)
        self.split = split
        self.think_on = True  # whether the answer that is being made will come after thinking

    def ours(self, key: str, one_in: int = 12) -> bool:
        held_out = zlib.crc32(key.encode()) % one_in == 0
        return held_out == (self.split == "eval")

    def pick(self, options):
        """A phrasing. Both splits share them: a small model answers the phrasings it was taught, so all are taught."""
        return self.rng.choice(options)

    def choice(self, options):
        return self.rng.choice(options)

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def draw(self, make, key=str, one_in: int = 12):
        """Draws from make() until the value belongs to this split; a small set may hold none for evaluation."""
        for _ in range(200):
            value = make()
            if self.ours(key(value), one_in):
                return value
        raise Exhausted


KEYS = {
    "a": "sqz", "b": "vn", "c": "xv", "d": "sf", "e": "wr", "f": "dg", "g": "fh", "h": "gj", "i": "uo", "j": "hk",
    "k": "jl", "l": "k", "m": "n", "n": "mb", "o": "ip", "p": "o", "q": "wa", "r": "et", "s": "ad", "t": "ry",
    "u": "yi", "v": "cb", "w": "qe", "x": "zc", "y": "tu", "z": "xs",
}  # fmt: skip


def misspell(ctx: Ctx, word: str) -> str:
    i = ctx.rng.randrange(1, len(word))
    kind = ctx.rng.randrange(4)
    if kind == 0 and i + 1 < len(word):
        return word[:i] + word[i + 1] + word[i] + word[i + 2 :]
    if kind == 1:
        return word[:i] + word[i + 1 :]
    if kind == 2:
        return word[:i] + word[i] + word[i:]
    return word[:i] + ctx.choice(KEYS.get(word[i].lower(), word[i])) + word[i + 1 :]


def typos(ctx: Ctx, text: str, protect) -> str:
    guarded = {w.strip("?.,!\"'").lower() for p in protect for w in str(p).split()}
    words = text.split(" ")
    spots = [i for i, w in enumerate(words) if len(w) >= 4 and w.isalpha() and w.lower() not in guarded]
    for i in ctx.rng.sample(spots, min(len(spots), 1 if ctx.chance(0.75) else 2)):
        words[i] = misspell(ctx, words[i])
    return " ".join(words)


BEFORE = ["please ", "Please ", "hey, ", "Hey, ", "hi, ", "hi! ", "Hello, ", "ok, ", "OK, ", "so ", "um, ", "quick question: ",
          "tell me: ", "I have a question: ", "well, ", "and ", "now, ", "Question: "]  # fmt: skip
AFTER = [" please", " please?", ", please", " pls", " plz", " thanks", ", thanks", " thank you", " :)", " ?", "??", "!"]


def humanise(ctx: Ctx, item: Item) -> str:
    """The question as hurried people type it: lower case, no final mark, typos, a polite word around it."""
    text = item.user
    if not item.noise or ctx.chance(0.3):
        return text
    if ctx.chance(0.1):
        text = ctx.choice(BEFORE) + (text if item.keep_case else text[0].lower() + text[1:])
    if ctx.chance(0.4) and text[-1:] in "?.!":
        text = text[:-1]
        if ctx.chance(0.15):
            text += ctx.choice(AFTER)
    if ctx.chance(0.4) and not item.keep_case:
        text = text.lower()
        if ctx.chance(0.4):
            text = text.replace("'", "")
    if ctx.chance(0.15):
        text = typos(ctx, text, item.protect)
    return text


def read_words() -> dict:
    words = {}
    for line in (HERE / "words.txt").read_text().splitlines():
        if not line.startswith("#"):
            kind, *rest = line.split()
            words[kind] = rest
    return words


def read_table(name: str) -> list:
    lines = (HERE / name).read_text().splitlines()
    return [line.split("|") for line in lines if line and not line.startswith("#")]


WORDS = read_words()
NAMES = """Anna Ben Carla David Emma Felix Grace Henry Ida Jack Kate Leo Mia Noah Olivia Paul Rosa Sam Tina Victor Wendy
Lucy Max Nina Oscar Ella Tom Sara Ali Yuki Omar Priya Chen Marta Ivan Zoe Amir Lena Hugo Clara Peter Julia Alex Maria John
Linda Mark Susan Karl Nora Eva Tim Laura Simon Alice Bob Robert James Mary Daniel Sofia Lucas Jonas Hannah""".split()
