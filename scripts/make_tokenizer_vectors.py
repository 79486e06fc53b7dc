#!/usr/bin/env python3
"""Golden vectors of the tokenizer tests, made by Hugging Face `tokenizers` (pip install tokenizers==0.23.3).

    scripts/make_tokenizer_vectors.py                       the committed set: tests/vectors/tokenizer
    scripts/make_tokenizer_vectors.py DIR --vocab 32768 --strings 20000
    scripts/make_tokenizer_vectors.py DIR --tokenizer models/demo --strings 20000
    scripts/make_tokenizer_vectors.py DIR --all-code-points

    scripts/make_tokenizer_vectors.py DIR --tokenizer REAL --strings 500 --seed 11     tests/vectors/tokenizer_real/cases.json

REAL has what ../shared/data/make_qwen35_tokenizer.py wrote; compare 20,000 texts with it in the same way as the demo's.
Each writes tokenizer.json, tokenizer_config.json and cases.json to DIR; compare with
`QUERN_TOKENIZER_VECTORS=DIR build/quern_tests -tc='tokenizer: vectors'`.

The tokenizer has the structure of Qwen3.6's: NFC, the same expression, byte-level BPE, the same 33 added tokens of
which the last 7 are only in tokenizer_config.json. It is trained on the source of Python's standard library,
Unicode character names and made-up words in many scripts; none of that text is kept. Another Python version gives
another vocabulary, and vectors as valid.
"""

import argparse
import json
import pathlib
import random
import shutil
import sys
import sysconfig
import unicodedata

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

ROOT = pathlib.Path(__file__).resolve().parent.parent
REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = 1
ADDED = [  # (text, special) in id order, as in Qwen3.6
    ("<|endoftext|>", 1), ("<|im_start|>", 1), ("<|im_end|>", 1), ("<|object_ref_start|>", 1),
    ("<|object_ref_end|>", 1), ("<|box_start|>", 1), ("<|box_end|>", 1), ("<|quad_start|>", 1),
    ("<|quad_end|>", 1), ("<|vision_start|>", 1), ("<|vision_end|>", 1), ("<|vision_pad|>", 1),
    ("<|image_pad|>", 1), ("<|video_pad|>", 1), ("<tool_call>", 0), ("</tool_call>", 0), ("<|fim_prefix|>", 0),
    ("<|fim_middle|>", 0), ("<|fim_suffix|>", 0), ("<|fim_pad|>", 0), ("<|repo_name|>", 0), ("<|file_sep|>", 0),
    ("<tool_response>", 0), ("</tool_response>", 0), ("<think>", 0), ("</think>", 0), ("<|audio_start|>", 1),
    ("<|audio_end|>", 1), ("<tts_pad>", 1), ("<tts_text_bos>", 1), ("<tts_text_eod>", 1),
    ("<tts_text_bos_single>", 1), ("<|audio_pad|>", 1),
]  # fmt: skip
CONFIG_ONLY = 7
SPACES = "\t\n\v\f\r \u0085\u00a0\u1680\u2000\u2003\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
# Characters near the borders of the pre-tokenizer's classes, and of NFC.
ODD = "\u180e\u200b\u200c\u200d\ufeff\u00ad\u2060\u0378\U000e0041\ufffe\uffff\U0010ffff\ue000\U000f0000\x00\x01\x1b\x7f"
EMOJI = [
    "😀", "👍🏽", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪", "🇩🇪🇫", "1️⃣", "☺️", "☺︎", "🧑🏿‍🚀", "❤️‍🔥", "🏴󠁧󠁢󠁳󠁣󠁴󠁿", "🫠", "🪿",
]  # fmt: skip
# First and last code point of stretches that matter: letters of many scripts, marks, numbers, symbols.
BLOCKS = [
    (0x21, 0x7E), (0xA1, 0xFF), (0x100, 0x24F), (0x250, 0x2FF), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x52F),
    (0x531, 0x58A), (0x591, 0x5F4), (0x600, 0x6FF), (0x700, 0x74F), (0x780, 0x7FF), (0x860, 0x8FF), (0x900, 0x97F),
    (0x980, 0x9FF), (0xA00, 0xA7F), (0xB80, 0xBFF), (0xC00, 0xC7F), (0xD00, 0xDFF), (0xE01, 0xE5B), (0xE80, 0xEDF),
    (0xF00, 0xFDA), (0x1000, 0x109F), (0x10A0, 0x10FF), (0x1100, 0x11FF), (0x1200, 0x139F), (0x13A0, 0x13FF),
    (0x1400, 0x167F), (0x1700, 0x17F9), (0x1800, 0x18AA), (0x1AB0, 0x1AFF), (0x1B00, 0x1B7E), (0x1C00, 0x1C4F),
    (0x1CD0, 0x1CFA), (0x1D00, 0x1DFF), (0x1E00, 0x1FFF), (0x2010, 0x206F), (0x2070, 0x20F0), (0x2100, 0x218B),
    (0x2190, 0x23FF), (0x2460, 0x27BF), (0x2C00, 0x2D7F), (0x2DE0, 0x2E5D), (0x3001, 0x30FF), (0x3105, 0x33FF),
    (0x4E00, 0x9FFF), (0xA000, 0xA4C6), (0xA500, 0xA6F7), (0xA700, 0xA82C), (0xA840, 0xABF9), (0xAC00, 0xD7A3),
    (0xD7B0, 0xD7FB), (0xF900, 0xFAD9), (0xFB00, 0xFDFF), (0xFE00, 0xFE6B), (0xFF01, 0xFFEE), (0x10000, 0x100FA),
    (0x10280, 0x103D5), (0x10400, 0x1056F), (0x105C0, 0x105F3), (0x10800, 0x10AFF), (0x10D00, 0x10F89),
    (0x11000, 0x1173F), (0x11800, 0x11AF8), (0x11B00, 0x11F59), (0x12000, 0x123FF), (0x13000, 0x143FA),
    (0x16100, 0x16D79), (0x16F00, 0x16FF1), (0x18D00, 0x18D08), (0x1B000, 0x1B2FB), (0x1D100, 0x1D1EA),
    (0x1D242, 0x1D378), (0x1D400, 0x1D7FF), (0x1E000, 0x1E2FF), (0x1E4D0, 0x1E4F9), (0x1E5D0, 0x1E5FF),
    (0x1E800, 0x1E959), (0x1F000, 0x1FAFF), (0x1FBF0, 0x1FBF9), (0x20000, 0x20100), (0x2EBF0, 0x2EC50),
    (0x2F800, 0x2FA1D), (0x31350, 0x313F0), (0xE0100, 0xE01EF),
]  # fmt: skip


def char(rng, block=None):
    first, last = block or rng.choice(BLOCKS)
    return chr(rng.randint(first, last))


def word(rng, block=None, longest=9):
    block = block or rng.choice(BLOCKS)
    return "".join(char(rng, block) for _ in range(rng.randint(1, longest)))


def library_text(limit):
    """Source of the standard library, in a fixed order, up to `limit` characters."""
    total = 0
    for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        yield text
        total += len(text)
        if total > limit:
            return


def training_text(limit):
    rng = random.Random(1)
    yield from library_text(limit)
    names = [unicodedata.name(chr(c), "") for c in range(0x20, 0x30000)]
    yield from (f"{name}\n{name.capitalize()}" for name in names if name)
    # Words repeat with falling frequency, so that merges form in every script.
    for block in BLOCKS:
        words = [word(rng, block, 6) for _ in range(400)]
        for _ in range(60):
            yield " ".join(words[min(int(rng.expovariate(0.02)), 399)] for _ in range(60))


def added_tokens(first_id):
    return {
        first_id + i: AddedToken(text, special=special == SPECIAL, normalized=False)
        for i, (text, special) in enumerate(ADDED)
    }


def train(vocab, out):
    tokenizer = Tokenizer(models.BPE(continuing_subword_prefix="", end_of_word_suffix=""))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(REGEX), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(training_text(vocab * 600), trainer)
    size = tokenizer.get_vocab_size()
    if size != vocab:
        sys.exit(f"the text gives only {size} of {vocab} tokens")
    tokens = added_tokens(size)
    for token in list(tokens.values())[:-CONFIG_ONLY]:
        tokenizer.add_tokens([token])
    root = json.loads(tokenizer.to_str())
    (out / "tokenizer.json").write_text(json.dumps(root, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
    fields = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    config = {
        "added_tokens_decoder": {str(i): {f: getattr(t, f) for f in fields} for i, t in tokens.items()},
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, separators=(",", ":")), encoding="utf-8")


def reference(directory):
    """(tokenizer with the added tokens of both files, tokenizer without any)."""
    text = (directory / "tokenizer.json").read_text(encoding="utf-8")
    full = Tokenizer.from_str(text)
    config_path = directory / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.exists() else {}
    for id_text, fields in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        if full.token_to_id(fields["content"]) is None:
            full.add_tokens([AddedToken(**fields)])
        assert full.token_to_id(fields["content"]) == int(id_text), fields
    root = json.loads(text)
    root["added_tokens"] = []
    return full, Tokenizer.from_str(json.dumps(root))


# ---- strings ----


def spaces(rng):
    return "".join(rng.choice(SPACES if rng.random() < 0.5 else " \n\r\t") for _ in range(rng.randint(1, 7)))


def marks(rng):
    """A letter under a heap of marks, old and young, in any order."""
    pool = [(0x300, 0x36F), (0x300, 0x345), (0x591, 0x5C7), (0x64B, 0x65F), (0x8CA, 0x8FF), (0x1AB0, 0x1ACE),
            (0x1DC0, 0x1DFF), (0x20D0, 0x20F0), (0xFE20, 0xFE2F), (0x93C, 0x94D), (0xC3C, 0xC56), (0x3099, 0x309A),
            (0x1D165, 0x1D172), (0x1E130, 0x1E136), (0x11930, 0x11943), (0x897, 0x89F), (0x10D69, 0x10D6D)]  # fmt: skip
    base = rng.choice(["a", "e", "O", "<", "=", "k", "の", "ক", "क", "ا", "\u1100", "\uac00", "\U00011935", "\u0f71", ""])
    return base + "".join(char(rng, rng.choice(pool)) for _ in range(rng.randint(1, 6)))


def decomposed(rng):
    text = word(rng, rng.choice([(0xC0, 0x17F), (0x1E00, 0x1FFF), (0xAC00, 0xD7A3), (0x900, 0xDFF), (0x3041, 0x30FF)]))
    return unicodedata.normalize(rng.choice(["NFD", "NFC", "NFKD"]), text)


def singletons(rng):
    return "".join(
        rng.choice("\u212a\u212b\u2126\u037e\u1fef\u0340\u0341\u0343\u0344\u0374\u0f73\u2000\u2001\u2329\uf900\ufb1d\ufb4e"
                   "\u0958\u0b94\u1026\U0001d15e\U0001d1bb\U0002f800\U000110ab\U00011938\u2adc")
        for _ in range(rng.randint(1, 5))
    )  # fmt: skip


def jamo(rng):
    return "".join(
        rng.choice([chr(rng.randint(0x1100, 0x1112)), chr(rng.randint(0x1161, 0x1175)), chr(rng.randint(0x11A7, 0x11C2)),
                    chr(0xAC00 + 28 * rng.randint(0, 398))])
        for _ in range(rng.randint(2, 8))
    )  # fmt: skip


def contraction(rng):
    tail = rng.choice(["s", "t", "re", "ve", "m", "ll", "d", "S", "T", "RE", "Ve", "lL", "D", "ſ", "x", "l", "r", "", "'"])
    return rng.choice(["it", "We", "", "1", " ", "é", "\n"]) + rng.choice("''''’\"`") + tail + rng.choice(["", "s", " a", "\u0301", "1"])


def number(rng):
    digits = rng.choice(["0123456789", "٠١٢٣٤٥٦٧٨٩", "०१२३४५६७८९", "０１２３", "½²③Ⅷ", "𝟘𝟙𝟚", "\U00010d40\U0001e5f1"])
    return "".join(rng.choice(digits + ".,") for _ in range(rng.randint(1, 9)))


def marker(rng):
    text = rng.choice(ADDED)[0]
    cut = rng.randint(1, len(text) - 1)
    return rng.choice(
        [text, text, text, text * 2, text[:cut], text[cut:], text[:cut] + text, text.upper(), text + "\u0338", "\u0301" + text,
         text[:cut] + "\u200b" + text[cut:], " " + text + " ", text + rng.choice(ADDED)[0]]
    )  # fmt: skip


def ascii_text(rng):
    return "".join(chr(rng.choice([rng.randint(32, 126), rng.randint(97, 122), 32])) for _ in range(rng.randint(1, 30)))


def anything(rng):
    def point():
        c = rng.choice([rng.randint(0, 0xFFFF), rng.randint(0, 0x1FFFF), rng.randint(0, 0x10FFFF)])
        return 0xFFFD if 0xD800 <= c < 0xE000 else c

    return "".join(chr(point()) for _ in range(rng.randint(1, 8)))


def library_slice(pool):
    def take(rng):
        start = rng.randrange(len(pool))
        return pool[start : start + rng.randint(1, 90)]

    return take


def strings(count, seed):
    """`count` different strings: single kinds and mixtures of them."""
    rng = random.Random(seed)
    pool = "".join(library_text(400_000))
    kinds = [
        word, word, spaces, marks, decomposed, singletons, jamo, contraction, number, marker, ascii_text, anything,
        library_slice(pool), lambda r: r.choice(EMOJI) * r.randint(1, 2), lambda r: r.choice(ODD),
        lambda r: r.choice("aA1 \n\r!\u0301é漢") * r.randint(1, 40),
        lambda r: "".join(r.choice("\"'.,;:!?()[]{}<>|/\\+-*=&^%$#@~_—…«»") for _ in range(r.randint(1, 12))),
    ]  # fmt: skip
    seen = {"": None}
    while len(seen) < count:
        parts = 1 if rng.random() < 0.3 else rng.randint(2, 6)
        text = "".join(rng.choice(kinds)(rng) + (" " if rng.random() < 0.2 else "") for _ in range(parts))
        seen.setdefault(text)
    return list(seen)


def code_point_strings():
    """Every code point that has been assigned so far, in the places where its class shows."""
    points = [c for c in [*range(0x32400), *range(0xE0000, 0xE0200)] if not 0xD800 <= c < 0xE000]
    for start in range(0, len(points), 64):
        chars = map(chr, points[start : start + 64])
        yield "".join(f"a{c}b {c}{c}1'{c}\n{c} ! {c}\u0301x\u0378{c}\u0334" for c in chars)


# ---- cases ----


def string_case(full, plain, text):
    case = {"text": text, "ids": full.encode(text, add_special_tokens=False).ids}
    literal = plain.encode(text, add_special_tokens=False).ids
    if literal != case["ids"]:
        case["literal"] = literal
    case.update(decodings(full, case["ids"], text))
    return case


def decodings(full, ids, expected):
    out = {}
    decoded = full.decode(ids, skip_special_tokens=False)
    if decoded != expected:
        out["decoded"] = decoded
    without = full.decode(ids, skip_special_tokens=True)
    if without != decoded:
        out["without_special"] = without
    return out


def stream_cases(full, count, seed):
    """Ids in no sensible order, so characters are cut anywhere; a few are beyond the vocabulary."""
    rng = random.Random(seed)
    size = full.get_vocab_size(with_added_tokens=True)
    for _ in range(count):
        ids = []
        for _ in range(rng.randint(1, 24)):
            ids.append(rng.choice([rng.randrange(256), rng.randrange(94, 256), rng.randrange(size), rng.randrange(size - 40, size + 9)]))
        yield {"ids": ids, "decoded": "", **decodings(full, ids, "")}


def invalid_cases(full, count, seed):
    """Bytes that are not UTF-8; the reference sees what Python's errors="replace" makes of them."""
    rng = random.Random(seed)
    for _ in range(count):
        data = bytearray(word(rng).encode() + rng.choice(EMOJI).encode() + marker(rng).encode())
        for _ in range(rng.randint(1, 5)):
            data[rng.randrange(len(data))] = rng.choice([0x80, 0xBF, 0xC0, 0xC3, 0xE0, 0xED, 0xF0, 0xF4, 0xF5, 0xFF, 0x41])
        data = bytes(data[: rng.randint(1, len(data))])
        text = data.decode("utf-8", "replace")
        yield {"bytes": data.hex(), "text": text, "ids": full.encode(text, add_special_tokens=False).ids}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=pathlib.Path, default=ROOT / "tests/vectors/tokenizer")
    parser.add_argument("--vocab", type=int, default=3000, help="tokens before the added ones")
    parser.add_argument("--strings", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--tokenizer", type=pathlib.Path, help="use this directory's tokenizer instead of training one")
    parser.add_argument("--all-code-points", action="store_true", help="one pass over Unicode instead of random strings")
    arguments = parser.parse_args()

    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    if arguments.tokenizer:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if (arguments.tokenizer / name).exists():
                shutil.copyfile(arguments.tokenizer / name, out / name)
    else:
        train(arguments.vocab, out)
    full, plain = reference(out)
    texts = code_point_strings() if arguments.all_code_points else strings(arguments.strings, arguments.seed)
    cases = {
        "size": full.get_vocab_size(with_added_tokens=True),
        "strings": [string_case(full, plain, text) for text in texts],
        "streams": list(stream_cases(full, arguments.strings // 10, arguments.seed)),
        "invalid": list(invalid_cases(full, arguments.strings // 10, arguments.seed)),
    }
    lines = ",\n".join(json.dumps(key) + ":" + rows(value) for key, value in cases.items())
    (out / "cases.json").write_text("{" + lines + "}\n", encoding="utf-8")
    print(f"{out}: {cases['size']} tokens, {len(cases['strings'])} strings")


def rows(value):
    """One case a line, so that a changed case is a changed line."""
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n" + ",\n".join(json.dumps(v, ensure_ascii=False, separators=(",", ":")) for v in value) + "]"


if __name__ == "__main__":
    main()
