"""One sequence's way from token deltas to text deltas: detokenising, stop strings, counts and times.

Owns: RequestStream, the text state of one sequence. Must not know: asyncio, HTTP, the engine's insides.
Called by: server.openai, once per delta that the engine client yields.

Rules, the same for streams and whole answers:

* ``num_output_tokens`` counts every generated token up to and including the one that ended the sequence, EOS too.
* EOS is never shown. The client's stop token is shown only with ``include_stop_str_in_output`` (and if special, only
  without ``skip_special_tokens``). Such a hidden last token is in ``token_ids`` but has no logprobs entry.
* The stop string that is complete first ends the text; of two that end at the same character, the longer one.
  A stop string that is the text of a special token also matches that token's id while special tokens are skipped.
* A stop string is honoured if the token that completes it is number ``min_tokens`` or later.
* Text that may become a stop string is held back, and given out when the sequence ends otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ropeway.engine.client import TokenDelta
from ropeway.protocol import FinishReason, PromptLogprobs, TokenLogprobs
from ropeway.server.detokenizer import make_detokenizer
from ropeway.server.tokenizer import Tokenizer

FINISH_WORDS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
    FinishReason.QUEUE_TIMEOUT: "queue_timeout",
    FinishReason.DEADLINE: "deadline",
}


@dataclass(slots=True)
class TextDelta:
    """What may be sent now."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # tokens past a stop are left out
    logprobs: list[TokenLogprobs] | None = None  # entry i belongs to token_ids[i]; a hidden last token has none
    finish_reason: str | None = None  # one of FINISH_WORDS, once
    stop_reason: int | str | None = None  # the client's stop token or stop string that ended it
    error: str | None = None
    # Beside logprobs: per token, the text that became certain with it, stop strings included; again without a hidden
    # last token. The sum of the lengths before a token is its text_offset.
    token_texts: list[str] = field(default_factory=list)


class RequestStream:
    """Feed it each TokenDelta in order. After a stop string, ``finished`` is true while the engine still generates:
    the caller must abort the engine's request."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_token_ids: Sequence[int],
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        eos_token_ids: Sequence[int] = (),
        shown_special_ids: frozenset[int] = frozenset(),
    ) -> None:
        """``shown_special_ids`` are in the text in spite of ``skip_special_tokens``. ``spaces_between_special_tokens``
        changes nothing, as :meth:`Tokenizer.decode` says."""
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self._sum_logprobs = 0.0
        self.first_scheduled: float | None = None  # time.monotonic(), like the next two
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self.prompt_logprobs: PromptLogprobs | None = None  # with the first delta
        self.embedding: list[float] | None = None  # likewise
        self.finished = False
        self._detokenizer = make_detokenizer(tokenizer, prompt_token_ids, skip_special_tokens, shown_special_ids)
        self._stops = [text for text in dict.fromkeys(stop) if text]
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._eos_token_ids = frozenset(eos_token_ids)
        self._held = ""  # the longest end of the text so far that begins a stop string
        self._stop_of_token: dict[int, str] = {}
        if skip_special_tokens:
            for text in self._stops:
                if (token_id := tokenizer.token_id(text)) in tokenizer.special_ids and token_id is not None:
                    self._stop_of_token[token_id] = text

    def feed(self, delta: TokenDelta, now: float) -> TextDelta:
        """The text that became certain. ``now``: time.monotonic(). Empty once finished."""
        if self.finished:
            return TextDelta()
        self._note(delta, now)
        if delta.finish_reason is None and not self._stops:  # the token path: nothing to look for, nothing ends
            self.num_output_tokens += len(delta.token_ids)
            if delta.logprobs is None:
                return TextDelta(self._detokenizer.extend(delta.token_ids), delta.token_ids)
            self._sum_logprobs += sum(entry.logprob for entry in delta.logprobs)
            pieces = [self._detokenizer.push(token_id) for token_id in delta.token_ids]
            return TextDelta("".join(pieces), delta.token_ids, delta.logprobs, token_texts=pieces)
        out = TextDelta(error=delta.error)
        num_shown = len(delta.token_ids) - self._hides_last(delta)
        for index, token_id in enumerate(delta.token_ids):
            self.num_output_tokens += 1
            out.token_ids.append(token_id)
            stop = self._stop_of_token.get(token_id)
            if stop is not None and self.num_output_tokens >= self._min_tokens:
                if self._finish(out, "stop", stop) and self._include_stop:
                    out.text += stop
                break
            if index == num_shown:
                break
            piece = self._detokenizer.push(token_id)
            out.token_texts.append(piece)
            if piece and self._advance(out, piece):
                break
        if delta.finish_reason is not None and not self.finished:
            self._finish(out, FINISH_WORDS[delta.finish_reason], delta.stop_reason)
        if delta.logprobs is not None:
            out.logprobs = delta.logprobs[: len(out.token_texts)]
            self._sum_logprobs += sum(entry.logprob for entry in delta.logprobs[: len(out.token_ids)])
        return out

    @property
    def mean_logprob(self) -> float:
        """Over the tokens that count as generated, where log-probabilities were asked for."""
        return self._sum_logprobs / max(1, self.num_output_tokens)

    def _note(self, delta: TokenDelta, now: float) -> None:
        if delta.num_cached_tokens is not None:
            self.num_cached_tokens = delta.num_cached_tokens
        if delta.first_scheduled is not None and self.first_scheduled is None:
            self.first_scheduled = delta.first_scheduled
            self.prompt_logprobs = delta.prompt_logprobs
            self.embedding = delta.embedding
        if delta.token_ids:
            if self.first_token_time is None:
                self.first_token_time = now
            self.last_token_time = now

    def _hides_last(self, delta: TokenDelta) -> bool:
        """Whether the delta's last token ended the sequence and is not to be seen."""
        if delta.finish_reason is not FinishReason.STOP or not delta.token_ids:
            return False
        if delta.token_ids[-1] in self._eos_token_ids:
            return True
        return delta.stop_reason is not None and not self._include_stop  # else it completed the grammar

    def _advance(self, out: TextDelta, piece: str) -> bool:
        """Take ``piece`` as the next text and release what is certain; true if it completed a stop string."""
        if not self._stops:
            out.text += piece
            return False
        known = len(self._held)
        text = self._held + piece
        if self.num_output_tokens >= self._min_tokens:
            # Only what ends in the new piece counts: an earlier one came before min_tokens.
            starts = [(text.find(stop, max(0, known - len(stop) + 1)), stop) for stop in self._stops]
            found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
            if found:
                end, start, stop = min(found)
                self._held = ""
                out.text += text[: end if self._include_stop else start]
                self._close(out, "stop", stop)
                return True
        certain = self._certain(text)
        out.text += text[:certain]
        self._held = text[certain:]
        return False

    def _certain(self, text: str) -> int:
        """Length of ``text`` before its longest end that begins a stop string."""
        certain = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= start < certain:
                if stop.startswith(text[start:]):
                    certain = start
                else:
                    start = text.find(stop[0], start + 1)
        return certain

    def _finish(self, out: TextDelta, reason: str, stop_reason: int | str | None) -> bool:
        """End for a reason outside the text. False if the text's last characters completed a stop string after all."""
        rest = self._detokenizer.flush()
        if rest and reason in ("stop", "length") and self._advance(out, rest):
            return False
        if reason not in ("stop", "length"):
            self._held += rest
        out.text += self._held
        self._held = ""
        self._close(out, reason, stop_reason)
        return True

    def _close(self, out: TextDelta, reason: str, stop_reason: int | str | None) -> None:
        self.finished = True
        out.finish_reason = reason
        out.stop_reason = stop_reason
