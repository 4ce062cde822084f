"""Staging buffers on a device that computes late: never rewritten, read or freed too early, in whatever order it runs."""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest
import torch

from fake_device import ORDERS, FakeDevice, FakeQueues, Operation, Order, Race, key_of
from ropeway.worker import staging
from ropeway.worker.staging import Uploads

SIZES = [1, 3, 100, 8_000, 20_000, 70_000]  # elements; the last ones outgrow a buffer


@pytest.fixture(autouse=True)
def few_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that each is soon used again."""
    monkeypatch.setattr(staging, "_NUM_UPLOADS", 2)


def arrays_of(rng: np.random.Generator, size: int) -> dict[str, np.ndarray]:
    return {
        "a": rng.integers(0, 1000, size, dtype=np.int64),
        "b": rng.integers(0, 1000, (size + 1, 2), dtype=np.int32)[:, ::2],
        "c": rng.random((2, size), dtype=np.float32),
        "d": np.zeros((0, 4), dtype=np.int64),
    }


def steps(device: FakeDevice, seed: int, count: int = 25) -> None:
    """Steps that upload once to three times, compute something and download it; results are taken up to two steps late."""
    rng, choices = np.random.default_rng(seed), random.Random(seed)
    waiting: list[tuple[object, list[np.ndarray]]] = []
    for _ in range(count):
        with device.launching(), torch.inference_mode():
            sums, expected = [], []
            for _ in range(choices.randint(1, 3)):
                arrays = arrays_of(rng, choices.choice(SIZES))
                tensors = device.upload(arrays)
                assert all(tensors[name].shape == array.shape for name, array in arrays.items())
                sums += [tensors["a"] * 2, tensors["b"] + 1, tensors["c"].clone()]
                expected += [arrays["a"] * 2, arrays["b"] + 1, arrays["c"]]
            waiting.append((device.download(sums), expected))
            del tensors, sums
            device.end_step()
            while len(waiting) > choices.randint(0, 2):
                download, expected = waiting.pop(0)
                results = download.result()  # type: ignore[attr-defined]
                assert all(np.array_equal(x.numpy(), y) for x, y in zip(results, expected, strict=True))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", range(3))
def test_values_arrive_in_any_order(order: Order, seed: int) -> None:
    steps(FakeDevice(order, seed), seed)


class Careless(FakeQueues):
    """Leaves out one kind of waiting."""

    def __init__(self, order: Order, *left_out: object) -> None:
        super().__init__(order)
        self.left_out = left_out

    def wait(self, queue, event) -> None:
        if (queue, event.queue) not in self.left_out:
            super().wait(queue, event)

    def wait_on_host(self, event) -> None:
        if ("host", event.queue) not in self.left_out:
            super().wait_on_host(event)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("queue", "other"),
    [("compute", "upload"), ("upload", "compute"), ("download", "compute"), ("host", "download")],
)
def test_an_event_that_is_not_waited_for_is_a_race(order: Order, queue: str, other: str) -> None:
    with pytest.raises(Race):
        steps(FakeDevice(queues=Careless(order, (queue, other))), 0)


def test_a_pinned_buffer_rewritten_in_flight_is_a_race() -> None:
    with pytest.raises(Race, match="rewritten"):
        steps(FakeDevice(queues=Careless("late", ("host", "upload"))), 0)


def test_device_memory_used_again_before_the_step_that_reads_it_ended_is_a_race() -> None:
    class Early(Uploads):
        """Marks a buffer as read when the upload is given, not when the step is."""

        def upload(self, arrays):
            tensors = super().upload(arrays)
            self.end_step()
            return tensors

    device = FakeDevice()
    device.uploads = Early(device.queues)
    with pytest.raises(Race, match="upload on the upload queue does not wait"):
        steps(device, 0)


def test_a_source_freed_before_its_download_is_a_race() -> None:
    device = FakeDevice("late")
    with device.launching(), torch.inference_mode():
        download = device.download([torch.arange(10) + 1])
        download._tensors.clear()
        gc.collect()
        with pytest.raises(Race, match="freed"):
            download.result()


def test_a_cache_block_written_for_its_next_owner_before_its_reader_ended_is_a_race() -> None:
    """As a copy between tiers would do it, on a queue of its own."""
    device = FakeDevice()
    cache = torch.zeros(4, 8)
    with device.launching(), torch.inference_mode():
        (cache[1] * 2).sum()
        moved = Operation("swap", lambda: None, writes=[key_of(cache)])
        with pytest.raises(Race, match="swap on the upload queue"):
            device.queues.give("upload", moved)
        device.queues.wait("upload", device.queues.record("compute"))
        device.queues.give("upload", moved)


def test_buffers_are_few_and_stop_growing() -> None:
    device = FakeDevice("late")
    made = []
    pinned = device.queues.pinned
    device.queues.pinned = lambda size: made.append(size) or pinned(size)  # type: ignore[method-assign]
    rng = np.random.default_rng(0)
    for turn in range(40):
        with torch.inference_mode():
            tensors = device.upload({"a": rng.integers(0, 9, 5_000 + 50 * turn, dtype=np.int64)})
            download = device.download([tensors["a"]])
            device.end_step()
            download.result()
    assert len(made) == 3  # two to upload, one to download


def test_a_download_of_nothing_tells_when_a_step_is_done() -> None:
    device = FakeDevice("late")
    ran = []
    device.queues.give("compute", Operation("work", lambda: ran.append(1)))
    download = device.download([])
    assert ran == []
    assert download.result() == []
    assert ran == [1]
