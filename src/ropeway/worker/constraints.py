"""Rows whose next token is not free: grammars and bad words, as bit masks over the vocabulary.

Owns: compiled grammars, one matcher per row, the threads that compile and that compute masks. Must not know: logits, how
tokens are chosen, text. Called by: worker.executor (compile, before a request is admitted) and worker.runner (apply,
begin, take), in the order of steps.

A mask depends on the tokens before it and on nothing that a step computes. So the masks of all rows are computed in
threads of their own while the model runs, and waited for before the tokens are drawn.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ropeway.constraint import RefusedGrammarError, compile_grammar, make_tokenizer, reason_of
from ropeway.engine.step import NewRow, SchedulerOutput
from ropeway.vocabulary import Vocabulary
from ropeway.worker.device import usable_cores

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Grammars that are kept though no row may be using them: about 75 kB each, and 200 bytes per character.
MAX_COMPILED = 1024
MAX_COMPILED_CHARS = 2**20
NICENESS = 5  # of the thread that compiles, below that of the threads that run the model


class Grammars:
    """Compiles; keeps what was compiled. Nothing of llguidance is loaded before the first grammar comes."""

    def __init__(self, load_vocabulary: Callable[[], Vocabulary], num_ids: int) -> None:
        """num_ids: the width of the model's output."""
        self._load_vocabulary = load_vocabulary
        self._num_ids = num_ids
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # at the beginning; rows have copies
        self._num_chars = 0  # of their sources
        self._lock = threading.Lock()  # of _compiled
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ropeway-grammar", initializer=_step_back)

    def compile(self, source: str, done: Callable[[str], None]) -> None:
        """Returns at once. ``done`` is called in the thread, with the reason if the grammar cannot be used."""

        def work() -> None:
            try:
                self._find(source)
            except Exception as error:
                done(str(error) or type(error).__name__)
            else:
                done("")

        self._thread.submit(work)

    def matcher(self, source: str) -> LLMatcher:
        """A new one, at the beginning. Raises RefusedGrammarError."""
        return self._find(source).deep_copy()

    @property
    def num_words(self) -> int:
        """Words of a mask. There is a tokenizer, since there has been a grammar."""
        assert self._tokenizer is not None
        return -(-self._tokenizer.vocab_size // 32)

    def _find(self, source: str) -> LLMatcher:
        with self._lock:
            if (found := self._compiled.get(source)) is not None:
                self._compiled.move_to_end(source)
                return found
        if self._tokenizer is None:
            vocabulary = self._load_vocabulary()
            backend = vocabulary.backend
            backend.encode_special_tokens = True  # a special token's text is text like any other
            self._tokenizer = make_tokenizer(
                vocabulary.all_token_bytes(),
                sorted(vocabulary.special_ids),
                vocabulary.eos_token_ids,
                num_ids=self._num_ids,
                encode=lambda text: backend.encode(text, add_special_tokens=False).ids,
            )
        found = compile_grammar(self._tokenizer, source)
        found.compute_bitmask()  # what is found out for the first mask is copied with it
        if found.is_error():
            raise RefusedGrammarError(reason_of(found))
        with self._lock:
            if source not in self._compiled:
                self._num_chars += len(source)
            self._compiled[source] = found
            while len(self._compiled) > MAX_COMPILED or (
                self._num_chars > MAX_COMPILED_CHARS and len(self._compiled) > 1
            ):
                self._num_chars -= len(self._compiled.popitem(last=False)[0])
        return found

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)


@dataclass(slots=True)
class _Row:
    epoch: int
    matcher: LLMatcher | None
    bad_words: tuple[tuple[int, ...], ...]
    ends: np.ndarray  # [n] int64; not allowed below min_tokens, as far as the grammar leaves a choice
    min_tokens: int
    outputs: list[int]  # generated so far


@dataclass(slots=True)
class StepMasks:
    """The masks of one step's rows, which may still be on their way."""

    rows: np.ndarray  # [n] int64; which of the rows that sample
    bits: np.ndarray  # [n, words] int32; bit i of word w allows token 32 w + i
    errors: dict[int, str] = field(default_factory=dict)  # of the rows that sample: why it has no mask
    _work: Future[None] | None = None

    def wait(self) -> None:
        if self._work is not None:
            self._work.result()


class Constraints:
    """The constrained rows, by request id."""

    def __init__(self, grammars: Grammars, num_ids: int, num_threads: int = 0) -> None:
        """num_ids: the width of the model's output. num_threads: for masks; 0 chooses."""
        self._grammars = grammars
        self._num_ids = num_ids
        self._num_threads = num_threads or max(1, usable_cores() // 2)
        self._rows: dict[int, _Row] = {}
        self._executor: Any = None  # an LLExecutor, once there was a grammar
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="ropeway-masks")

    def apply(self, plan: SchedulerOutput) -> None:
        """Forget the removed rows, take in the added ones. A row that comes back has its tokens consumed again."""
        for request_id in plan.removed:
            self._rows.pop(request_id, None)
        for new in plan.added:
            if new.sampling.grammar or new.sampling.bad_words:
                self._rows[new.request_id] = self._make(new)

    def _make(self, new: NewRow) -> _Row:
        sampling = new.sampling
        outputs = new.token_ids[new.num_prompt_tokens :]
        matcher = self._grammars.matcher(sampling.grammar) if sampling.grammar else None
        if matcher is not None:
            for token in outputs:
                matcher.consume_token(token)
        ends = {id for id in sampling.eos_token_ids + sampling.stop_token_ids if 0 <= id < self._num_ids}
        return _Row(
            epoch=new.epoch,
            matcher=matcher,
            bad_words=sampling.bad_words,
            ends=np.array(sorted(ends), dtype=np.int64),
            min_tokens=sampling.min_tokens,
            outputs=list(outputs),
        )

    def begin(self, plan: SchedulerOutput, sampled: list[int]) -> StepMasks | None:
        """Start on the masks. sampled: the plan's index of each row that samples. None if no row is constrained."""
        if not self._rows:
            return None
        found = [(i, row) for i, index in enumerate(sampled) if (row := self._rows.get(plan.request_ids[index]))]
        if not found:
            return None
        with_grammar = any(row.matcher is not None for _, row in found)
        num_words = self._grammars.num_words if with_grammar else -(-self._num_ids // 32)
        masks = StepMasks(
            rows=np.array([i for i, _ in found], dtype=np.int64),
            bits=np.full((len(found), num_words), -1, dtype=np.int32),
        )
        if with_grammar:
            masks._work = self._helper.submit(self._compute, found, masks)
        else:
            self._compute(found, masks)
        return masks

    def _compute(self, found: list[tuple[int, _Row]], masks: StepMasks) -> None:
        bits = masks.bits
        jobs = [(row.matcher, line) for line, (_, row) in enumerate(found) if row.matcher is not None]
        if jobs:
            if self._executor is None:
                from llguidance import LLExecutor

                self._executor = LLExecutor(self._num_threads)
            self._executor.unsafe_compute_mask_ptr(jobs, bits.ctypes.data, bits.strides[0], len(bits))
        for line, (i, row) in enumerate(found):
            if row.matcher is not None:
                if row.matcher.is_error():  # then llguidance allows an end, which would pass for a good one
                    bits[line] = 0
                    masks.errors[i] = f"the grammar cannot be followed: {reason_of(row.matcher)}"
                elif row.min_tokens > len(row.outputs):
                    _forbid_ends(bits[line], row.ends)
            for *before, last in row.bad_words:
                if row.outputs[len(row.outputs) - len(before) :] == before and last < self._num_ids:
                    bits[line, last >> 5] &= _CLEARED[last & 31]

    def take(self, request_id: int, epoch: int, token: int) -> bool:
        """The row's next token is known. Returns whether it completes the grammar, so that nothing may follow it.

        A row that went meanwhile, and may be back in another epoch, is left alone.
        """
        row = self._rows.get(request_id)
        if row is None or row.epoch != epoch:
            return False
        row.outputs.append(token)
        return row.matcher is not None and row.matcher.consume_token(token) and row.matcher.is_stopped()

    def __bool__(self) -> bool:
        return bool(self._rows)

    def close(self) -> None:
        self._helper.shutdown()


_CLEARED = np.array([~(1 << bit) & 0xFFFFFFFF for bit in range(32)], dtype=np.uint32).view(np.int32)


def _forbid_ends(line: np.ndarray, ends: np.ndarray) -> None:
    """Clear the ends' bits, unless the grammar allows nothing else: it ends sooner than min_tokens then."""
    without = line.copy()
    for end in ends.tolist():
        without[end >> 5] &= _CLEARED[end & 31]
    if without.any():
        line[:] = without


def _step_back() -> None:
    """On Linux, a thread has a priority of its own."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


__all__ = ["Constraints", "Grammars", "StepMasks"]
