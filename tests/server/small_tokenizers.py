"""Small tokenizers of every kind that models come with, trained on the spot, and their folders.

Called by: the server tests. Each is a `tokenizers` backend with its tokenizer_config.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from ropeway.server.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It isn't there, is it? No! I'm sure they've gone; we're not.",
    "Hello. It is fine.\n  indented  twice,\tand a tab.\n\nNew paragraph: 1 + 2 = 3 (or 12345).",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))  # prints three",
    "Příliš žluťoučký kůň úpěl ďábelské ódy. 你好,世界。 नमस्ते दुनिया 😀 👨‍👩‍👧 naïve café",
]
TEXTS = [
    *CORPUS,
    "",
    " ",
    "  two leading spaces",
    "trailing  ",
    "Hello",
    "你 好 😀😀 👨‍👩‍👧‍👦 \u0301combining",
    "<s>a</s> <|im_start|>user\nhi<|im_end|>\n<tool>x</tool>",
    "don't we 've ' n't . . , ! ?",
    "\x00\x01 control \ufffd replacement",
]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
CHATML = ["<|im_start|>", "<|im_end|>"]


def byte_level() -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """GPT-2, SmolLM2, Qwen, Llama 3: byte-level BPE; also added tokens that are not special or hold odd letters."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", *CHATML]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("</tool>", normalized=False)])
    backend.add_tokens(["two words", "žluť"])
    return backend, {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "pad_token": "<|endoftext|>"}


def _pieces(tokens: list[str]) -> tokenizers.Tokenizer:
    """A sentencepiece-like BPE model, byte tokens included, without the other parts."""
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    raw.train_from_iterator(CORPUS[:3], trainers.BpeTrainer(vocab_size=260, show_progress=False))
    trained = json.loads(raw.to_str())["model"]
    vocab = [*tokens, *BYTE_TOKENS, "▁▁", "▁▁▁▁", *(piece for piece in trained["vocab"] if piece not in ("▁▁", "▁▁▁▁"))]
    ids = {token: index for index, token in enumerate(vocab)}
    merges = [tuple(pair) for pair in trained["merges"]]
    return tokenizers.Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))


def llama2() -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Llama 2, Mistral, Phi-3: byte fallback; the decoder strips one leading space; BOS is added."""
    backend = _pieces(["<unk>", "<s>", "</s>"])
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def gemma() -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Gemma: byte fallback, no space is added or stripped."""
    backend = _pieces(["<pad>", "<eos>", "<bos>", "<unk>"])
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.post_processor = processors.TemplateProcessing("<bos> $A", "<bos> $A $B", [("<bos>", 2)])
    backend.add_special_tokens(["<pad>", "<eos>", "<bos>", "<unk>"])
    return backend, {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}


def unigram() -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Unigram with Metaspace, and spaces to be cleaned up after decoding."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator([*CORPUS, " . , ? ! ' n't 'm 's 've 're"] * 3, trainer)
    return backend, {"eos_token": "</s>", "unk_token": "<unk>", "clean_up_tokenization_spaces": True}


def wordpiece() -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    trainer = trainers.WordPieceTrainer(vocab_size=220, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend, {"eos_token": "[SEP]", "unk_token": "[UNK]", "clean_up_tokenization_spaces": True}


def end_of_word() -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """BPE whose tokens carry the end of a word: a token's space is known only when the next one comes."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=220, special_tokens=["<unk>", "</s>"], end_of_word_suffix="</w>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend, {"eos_token": "</s>", "unk_token": "<unk>", "clean_up_tokenization_spaces": True}


KINDS: dict[str, Callable[[], tuple[tokenizers.Tokenizer, dict[str, Any]]]] = {
    "byte_level": byte_level,
    "llama2": llama2,
    "gemma": gemma,
    "unigram": unigram,
    "wordpiece": wordpiece,
    "end_of_word": end_of_word,
}


@cache
def _built(kind: str) -> tuple[str, str]:
    """tokenizer.json and tokenizer_config.json."""
    backend, settings = KINDS[kind]()
    return backend.to_str(), json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings})


def write_folder(kind: str, folder: Path, **more: Any) -> Path:
    """A model folder with this tokenizer; ``more`` goes into tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    backend, settings = _built(kind)
    (folder / "tokenizer.json").write_text(backend, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(json.loads(settings) | more), encoding="utf-8")
    return folder


@cache
def small_tokenizer(kind: str) -> Tokenizer:
    """The same through Ropeway, loaded once."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer.load(write_folder(kind, Path(folder)))
