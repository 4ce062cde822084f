"""Filling in the middle: from a prompt and a suffix to the tokens that ask a model for what stands between them.

Owns: the families of models that were trained for it, told by the special tokens of their vocabulary. Must not know:
requests, how sequences run. Called by: completions.
"""

from __future__ import annotations

from dataclasses import dataclass

from ropeway.server.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Family:
    """The tokens that stand before the prompt, before the suffix and, in most families, before the answer."""

    prompt: str
    suffix: str
    answer: str = ""
    suffix_first: bool = False
    ends: tuple[str, ...] = ()  # with which its models end an answer, besides the model's own end tokens


FAMILIES = (
    Family(  # Qwen coder, CodeGemma
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ends=("<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|file_separator|>", "<|repo_name|>"),
    ),
    Family("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ends=("<|endoftext|>", "<file_sep>")),  # StarCoder, Granite
    Family("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<|endoftext|>",)),  # SantaCoder
    Family("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),  # Code Llama
    Family("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    Family("[PREFIX]", "[SUFFIX]", suffix_first=True),  # Codestral
)


@dataclass(frozen=True, slots=True)
class Infill:
    """A family whose tokens this tokenizer has."""

    tokenizer: Tokenizer
    family: Family

    @classmethod
    def find(cls, tokenizer: Tokenizer) -> Infill | None:
        for family in FAMILIES:
            marks = (family.prompt, family.suffix, family.answer)
            if all(tokenizer.token_id(mark) is not None for mark in marks if mark):
                return cls(tokenizer, family)
        return None

    @property
    def end_token_ids(self) -> list[int]:
        found = map(self.tokenizer.token_id, self.family.ends)
        return [token_id for token_id in found if token_id is not None]

    async def prompt_ids(self, prompt: str | list[int], suffix: str, add_special_tokens: bool) -> list[int]:
        """What to generate from. prompt: a text, or ids. add_special_tokens: whether a beginning of sequence, if the
        tokenizer puts one before texts, is put before all."""
        encode = self.tokenizer.encode_async
        begin = await encode("", add_special_tokens)
        before = await encode(prompt, False) if isinstance(prompt, str) else prompt
        after = await self._encode_inside(suffix)
        parts = [(self.family.prompt, before), (self.family.suffix, after)]
        if self.family.suffix_first:
            parts.reverse()
        for mark, ids in parts:
            begin += [*self._mark(mark), *ids]
        return begin + self._mark(self.family.answer)

    async def _encode_inside(self, text: str) -> list[int]:
        """As the text is encoded where other text precedes it. Some tokenizers put a space before one that begins."""
        if self.tokenizer.is_byte_level:
            return await self.tokenizer.encode_async(text, False)
        before = "☺"  # merges with nothing
        return (await self.tokenizer.encode_async(before + text, False))[len(self.tokenizer.encode(before, False)) :]

    def _mark(self, mark: str) -> list[int]:
        token_id = self.tokenizer.token_id(mark) if mark else None
        return [] if token_id is None else [token_id]
