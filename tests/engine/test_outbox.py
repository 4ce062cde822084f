"""The step loop's way into the pipe: at once while there is room, in order always, never waiting."""

from __future__ import annotations

import multiprocessing
import threading

from ropeway.engine.process import MAX_DIRECT_BYTES, _Outbox


def test_a_message_is_in_the_pipe_when_send_returns():
    ours, theirs = multiprocessing.Pipe()
    outbox = _Outbox(ours)
    for number in range(3):
        outbox.send(b"%d" % number)
        assert theirs.poll(0)
        assert theirs.recv_bytes() == b"%d" % number
    assert outbox._num_queued == 0
    outbox.close(5.0)


def test_a_reader_that_is_late_stalls_nobody_and_gets_all_in_order():
    ours, theirs = multiprocessing.Pipe()
    outbox = _Outbox(ours)
    sizes = [10, 3 * 2**20, 10, MAX_DIRECT_BYTES, *[MAX_DIRECT_BYTES + 1] * 300, 10]  # far more than the pipe holds
    messages = [bytes([number % 256]) * size for number, size in enumerate(sizes)]
    sender = threading.Thread(target=lambda: [outbox.send(message) for message in messages], daemon=True)
    sender.start()
    sender.join(20.0)
    assert not sender.is_alive(), "send waits for the reader"
    assert [theirs.recv_bytes() for _ in messages] == messages
    outbox.send(b"afterwards")
    assert theirs.recv_bytes() == b"afterwards"
    outbox.close(5.0)


def test_small_messages_alone_fill_the_pipe_and_still_do_not_wait():
    ours, theirs = multiprocessing.Pipe()
    outbox = _Outbox(ours)
    messages = [b"%07d" % number * 400 for number in range(1000)]
    sender = threading.Thread(target=lambda: [outbox.send(message) for message in messages], daemon=True)
    sender.start()
    sender.join(20.0)
    assert not sender.is_alive(), "send waits for the reader"
    assert 0 < outbox._num_queued < len(messages)
    assert [theirs.recv_bytes() for _ in messages] == messages
    outbox.close(5.0)
