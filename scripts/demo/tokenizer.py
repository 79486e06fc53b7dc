"""Trains the byte-level BPE tokenizer: Qwen's pre-tokenizer regex and its 33 added tokens, a small vocabulary."""
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BASE_VOCAB = 3000
# (text, special) in the order of Qwen3.6. The last seven stand only in tokenizer_config.json, as they do there.
ADDED = [
    ("<|endoftext|>", True), ("<|im_start|>", True), ("<|im_end|>", True), ("<|object_ref_start|>", True), ("<|object_ref_end|>", True),
    ("<|box_start|>", True), ("<|box_end|>", True), ("<|quad_start|>", True), ("<|quad_end|>", True), ("<|vision_start|>", True),
    ("<|vision_end|>", True), ("<|vision_pad|>", True), ("<|image_pad|>", True), ("<|video_pad|>", True), ("<tool_call>", False),
    ("</tool_call>", False), ("<|fim_prefix|>", False), ("<|fim_middle|>", False), ("<|fim_suffix|>", False), ("<|fim_pad|>", False),
    ("<|repo_name|>", False), ("<|file_sep|>", False), ("<tool_response>", False), ("</tool_response>", False), ("<think>", False),
    ("</think>", False), ("<|audio_start|>", True), ("<|audio_end|>", True), ("<tts_pad>", True), ("<tts_text_bos>", True),
    ("<tts_text_eod>", True), ("<tts_text_bos_single>", True), ("<|audio_pad|>", True),
]  # fmt: skip
IN_TOKENIZER_JSON = 26
IDS = {text: BASE_VOCAB + i for i, (text, _) in enumerate(ADDED)}
ADDRESSABLE = BASE_VOCAB + len(ADDED)
ROWS = 3072  # rows of the embedding and head; those from ADDRESSABLE on belong to no token


def empty_tokenizer(model) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated", invert=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def added(text: str, special: bool) -> AddedToken:
    return AddedToken(text, lstrip=False, rstrip=False, single_word=False, normalized=False, special=special)


def train(texts) -> Tokenizer:
    tokenizer = empty_tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=BASE_VOCAB, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    # Added tokens are not text: cut them out first.
    marks = sorted((t for t, _ in ADDED), key=len, reverse=True)

    def pieces():
        for text in texts:
            for mark in marks:
                if mark in text:
                    text = text.replace(mark, "\0")
            yield from filter(None, text.split("\0"))

    tokenizer.train_from_iterator(pieces(), trainer)
    assert tokenizer.get_vocab_size() == BASE_VOCAB, tokenizer.get_vocab_size()
    for text, special in ADDED[:IN_TOKENIZER_JSON]:
        tokenizer.add_tokens([added(text, special)])
    assert all(tokenizer.token_to_id(t) == IDS[t] for t, _ in ADDED[:IN_TOKENIZER_JSON])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {str(IDS[t]): {"content": t, **flags, "special": special} for t, special in ADDED},
        "additional_special_tokens": [t for t, special in ADDED if special and t not in ("<|endoftext|>",)],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2TokenizerFast",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
