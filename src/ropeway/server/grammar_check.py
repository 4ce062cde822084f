"""Tries each grammar in a process of its own before a request with it is admitted.

Owns: those processes, their limits of time and memory, the queue before them, what is remembered of earlier tries. Must
not know: HTTP, where a grammar came from. Called by: service (check, once per request with a grammar; close).

A grammar is somebody else's program. Compiling one may take minutes, gigabytes or the whole stack, and cannot be
interrupted; a process can be killed. So there is a checker process, which holds the vocabulary and forks for each try: a
try that is killed costs nothing but its own time.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from ropeway.constraint import RefusedGrammarError, compile_grammar, make_tokenizer, reason_of
from ropeway.errors import RequestError
from ropeway.metrics import Metrics
from ropeway.server.grammar import GrammarError
from ropeway.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

TIME_LIMIT = 0.85  # seconds a try may run, so that two hostile ones in a row are refused within two seconds
START_LIMIT = 30.0  # seconds for the process to import and to take in the vocabulary
MEMORY_LIMIT = 2**30  # bytes of address space beside what the checker has
STACK_BYTES = 2**20  # less than any stack in the engine: what overflows, overflows here
NICENESS = 5
TRIED_TOKENS = 16  # generated at random after compiling: what is too complex to run shows at once
MAX_QUEUED = 256
MAX_WAIT = 10.0  # seconds in the queue, which most grammars leave after milliseconds
MAX_REMEMBERED = 512
_GBNF = re.compile(r'%gbnf ("(?:[^"\\]|\\.)*")')


class GrammarChecker:
    """One per server. The process is started when it is first needed, and again after it was killed."""

    def __init__(self, vocabulary: Vocabulary, metrics: Metrics) -> None:
        self._vocabulary = vocabulary
        self._metrics = metrics
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")  # talks to the process; its queue is ours
        self._tries: dict[bytes, asyncio.Future[str]] = {}  # queued or running, by hash of the source
        self._known: OrderedDict[bytes, str | GrammarError] = OrderedDict()  # "" where the source was good as it was
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self._closed = False

    async def check(self, source: str) -> str:
        """The grammar in the form that the engine takes. Requests with the same source share one try.

        Raises GrammarError with the reason, or RequestError(429) when too many wait.
        """
        key = hashlib.sha256(source.encode()).digest()
        known = self._known.get(key)
        if known is None:
            if (running := self._tries.get(key)) is None:
                if len(self._tries) > MAX_QUEUED:
                    raise self._queue_full()
                loop = asyncio.get_running_loop()
                latest = time.monotonic() + MAX_WAIT
                running = self._tries[key] = loop.run_in_executor(self._thread, self._try, source, latest)
                running.add_done_callback(lambda done: self._remember(key, done))
            try:
                known = await asyncio.shield(running)  # one client that leaves does not take it from the others
            except GrammarError as error:
                known = error
        else:
            self._known.move_to_end(key)
        if isinstance(known, GrammarError):
            raise GrammarError(str(known))
        return known or source

    def _queue_full(self) -> RequestError:
        self._metrics.grammar_refused("queue_full")
        return RequestError(
            "Too many grammars are waiting to be compiled.",
            status=429,
            type="rate_limit_error",
            code="grammar_queue_full",
            headers={"Retry-After": "1"},
        )

    def _remember(self, key: bytes, done: asyncio.Future[str]) -> None:
        del self._tries[key]
        if done.cancelled():
            return
        error = done.exception()
        if error is None or isinstance(error, GrammarError):
            self._known[key] = done.result() if error is None else error
            if len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)

    def close(self) -> None:
        """End the process, also in the middle of a try."""
        self._closed = True
        if self._process is not None:
            self._process.kill()
        self._thread.shutdown(cancel_futures=True)
        self._forget_process()

    # In the thread

    def _try(self, source: str, latest: float) -> str:
        """Empty if the source is good as it is, else what it was translated to. Raises GrammarError, and RequestError
        if ``latest`` (time.monotonic()) has passed."""
        if time.monotonic() > latest:
            raise self._queue_full()
        for last in (False, True):
            pipe = self._start()
            began = time.monotonic()
            try:
                pipe.send(source)
                cause, answer = pipe.recv()
                break
            except (EOFError, OSError):  # somebody ended the checker
                self._forget_process()
                if last or self._closed:
                    raise RuntimeError("the process that compiles grammars ended twice") from None
        self._metrics.grammar_compiled(time.monotonic() - began)
        if cause:
            self._metrics.grammar_refused(cause)
            raise GrammarError(answer)
        return "" if answer == source else str(answer)

    def _start(self) -> Connection:
        """To the checker, once it is ready: its start is not the grammar's time. Nothing to do if there is one."""
        if self._pipe is not None:
            return self._pipe
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=run_checker, args=(theirs,), name="ropeway-grammar", daemon=True)
        self._process.start()
        theirs.close()
        vocabulary = self._vocabulary
        tokens = vocabulary.all_token_bytes()
        try:
            self._pipe.send((tokens, sorted(vocabulary.special_ids), vocabulary.eos_token_ids))
            if not self._pipe.poll(START_LIMIT):
                raise TimeoutError
            self._pipe.recv()
        except (OSError, EOFError) as error:
            self._forget_process()
            raise RuntimeError("the process that compiles grammars could not start") from error
        return self._pipe

    def _forget_process(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None


# In the checker


def run_checker(pipe: Connection) -> None:
    """Main of the checker: a vocabulary first, then sources, each answered with (cause of refusal or "", text). It never
    looks into a source itself, and leaves when the server is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it reaches the whole group, and the server may still drain
    with contextlib.suppress(EOFError, OSError):
        tokens, special_ids, eos_token_ids = pipe.recv()
        tokenizer = make_tokenizer(tokens, special_ids, eos_token_ids, num_ids=len(tokens))
        gc.freeze()  # a fork that counts references in all of this would copy it
        pipe.send("ready")
        while True:
            pipe.send(_try_in_fork(tokenizer, pipe.recv()))
    os._exit(0)


def _try_in_fork(tokenizer: LLTokenizer, source: str) -> tuple[str, str]:
    answers, theirs = multiprocessing.Pipe(duplex=False)
    child = os.fork()  # safe: this process has no other threads
    if child == 0:
        try:
            signal.setitimer(signal.ITIMER_REAL, 4 * TIME_LIMIT)  # should nobody be left to kill it
            os.nice(NICENESS)
            _limit_memory()
            threading.stack_size(STACK_BYTES)
            thread = threading.Thread(target=lambda: theirs.send(try_grammar(tokenizer, source)))
            thread.start()
            thread.join()
        finally:
            os._exit(0)
    theirs.close()
    try:
        if not answers.poll(TIME_LIMIT):
            return "timeout", f"it takes longer than {TIME_LIMIT} s to compile"
        cause, answer = answers.recv()
        return cause, answer
    except EOFError:
        return "crash", "it takes too much memory or is nested too deeply"
    finally:
        answers.close()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def try_grammar(tokenizer: LLTokenizer, source: str) -> tuple[str, str]:
    """(cause of refusal, reason), or ("", the grammar for the engine)."""
    try:
        source = _GBNF.sub(lambda found: f"%lark {{\n{_translate(json.loads(found[1]))}\n}}", source)
        _walk(compile_grammar(tokenizer, source))
    except RefusedGrammarError as error:
        return "invalid", str(error)
    return "", source


def _translate(gbnf: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(gbnf))
    except RecursionError:
        raise RefusedGrammarError("it is nested too deeply") from None
    except Exception as error:  # the translator raises its own kinds, and bare ones
        raise RefusedGrammarError(str(error)[:500] or "it cannot be read") from None


def _walk(matcher: LLMatcher) -> None:
    """Generate a few tokens at random. Raises RefusedGrammarError if nothing can be, or it takes too much."""
    choose = random.Random(0)
    for _ in range(TRIED_TOKENS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.stop_reason().startswith("NoExtension"):
            raise RefusedGrammarError("no text can satisfy it")
        if matcher.is_error():
            raise RefusedGrammarError(f"it is too complex: {reason_of(matcher)}")
        start = choose.randrange(mask.bit_length())
        rest = mask >> start  # not empty: the highest bit is set
        token = start + (rest & -rest).bit_length() - 1
        if not matcher.consume_token(token):
            raise RefusedGrammarError(f"it is too complex: {reason_of(matcher)}")
        if matcher.is_stopped():
            return


def _limit_memory() -> None:
    with contextlib.suppress(OSError):  # no /proc: no limit beside the time
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY_LIMIT
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


__all__ = ["GrammarChecker", "run_checker"]
