"""The demo's tokenizer: a small byte-level BPE with Qwen3.6's pre-tokenizer and its 33 added tokens, and encoding."""
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from .chat import render
from .common import JOIN, Ctx
from .mix import conversation

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = """<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|>
<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>""".split()
PLAIN = """<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>
<tool_response> </tool_response> <think> </think>""".split()
AUDIO = """<|audio_start|> <|audio_end|> <tts_pad> <tts_text_bos> <tts_text_eod> <tts_text_bos_single>
<|audio_pad|>""".split()  # as in Qwen3.6: only in tokenizer_config.json
ADDED = SPECIAL + PLAIN + AUDIO


def train_tokenizer(words: int, seed: int = 7, conversations: int = 60000) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=words, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )

    def corpus():
        ctx = Ctx(seed, "train")
        for _ in range(conversations):
            c = conversation(ctx)
            for message in c["messages"]:
                yield message.get("content", "").replace(JOIN, "")
                yield message.get("think", "").replace(JOIN, "")

    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in PLAIN])
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in AUDIO])
    return tokenizer


def encode(tokenizer: Tokenizer, conversation_: dict) -> tuple:
    """(ids, targets): the rendered conversation; targets[i] is 1 where the model has to write ids[i]."""
    ids, targets = [], []
    for text, target in render(conversation_["messages"], conversation_["tools"], conversation_["thinking"]):
        pieces = text.split(JOIN) if target else [text.replace(JOIN, "")]
        for piece in pieces:
            new = tokenizer.encode(piece, add_special_tokens=False).ids
            ids += new
            targets += [int(target)] * len(new)
    return ids, targets


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    data = json.loads(tokenizer.to_str())
    audio = [t for t in data["added_tokens"] if t["content"] in AUDIO]
    data["added_tokens"] = [t for t in data["added_tokens"] if t["content"] not in AUDIO]
    (directory / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\n")
    decoder = {
        str(t["id"]): {k: t[k] for k in ("content", "lstrip", "normalized", "rstrip", "single_word", "special")}
        for t in data["added_tokens"] + audio
    }
    config = {
        "added_tokens_decoder": decoder,
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 2048,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n")
