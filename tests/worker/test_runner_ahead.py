"""The real runner on a device that computes late: the same tokens as on a CPU, one request at a time, whatever the order,
with and without graphs and overlap; and nothing that waits for the device but the results."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_runner import TINY, new_row, plan

from fake_device import FakeDevice, Order, Race, without_packing
from ropeway.attention.torch_ref import TorchAttention
from ropeway.config import CacheConfig, Config, SchedulerConfig
from ropeway.engine.core import build_core
from ropeway.engine.step import Handle, KVCapacity, ModelRunnerOutput, SchedulerOutput
from ropeway.model.decoder import Decoder
from ropeway.model.loader import load_model
from ropeway.model.parallel import SINGLE
from ropeway.model.registry import parse_config
from ropeway.protocol import AddRequest, SamplingParams
from ropeway.worker.batch import RequestRows
from ropeway.worker.device import CpuDevice
from ropeway.worker.runner import ModelRunner, PendingStep, allocate_kv_cache
from static_attention import StaticAttention

SMALL = {**TINY, "num_hidden_layers": 2, "max_position_embeddings": 64}
BLOCK, MAX_LEN, VOCAB, MAX_SEQS = 4, 64, 120, 6


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The operations are tiny, and torch's other threads would only spin."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = tmp_path_factory.mktemp("small")
    (folder / "config.json").write_text(json.dumps(SMALL))
    with without_packing():
        return load_model(
            folder,
            parse_config(SMALL),
            dtype=torch.float32,
            device=torch.device("cpu"),
            load_format="dummy",
            seed=1,
            group=SINGLE,
        )


def make_runner(decoder: Any, backend: Any, device: Any, num_blocks: int, *, graphs: bool = False) -> ModelRunner:
    cache = allocate_kv_cache(
        backend,
        num_blocks=num_blocks,
        num_layers=2,
        block_size=BLOCK,
        num_kv_heads=2,
        head_dim=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return ModelRunner(
        decoder,
        backend,
        device,
        cache,
        block_size=BLOCK,
        max_num_seqs=MAX_SEQS,
        max_model_len=MAX_LEN,
        vocab_size=VOCAB,
        graphs=graphs,
    )


class Ahead:
    """engine.step.Executor on the fake device."""

    def __init__(
        self,
        decoder: Any,
        order: Order,
        *,
        seed: int = 0,
        num_blocks: int = 40,
        graphs: bool = True,
        device: Any = None,
    ) -> None:
        self.device = device or FakeDevice(order, seed)
        with self.device.launching():
            backend = StaticAttention(self.device, BLOCK)
            self.runner = make_runner(decoder, backend, self.device, num_blocks, graphs=graphs)
        self.num_blocks = num_blocks
        self.most_in_flight = self.in_flight = 0

    def start(self) -> KVCapacity:
        return KVCapacity(self.num_blocks, BLOCK, MAX_LEN, VOCAB, "float32", "fake", "Llama", step_tokens=64)

    def submit(self, plan: SchedulerOutput) -> Handle:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        with self.device.launching():
            return _Handle(self, self.runner.begin(plan))

    def close(self) -> None:
        pass


class _Handle:
    def __init__(self, owner: Ahead, step: PendingStep) -> None:
        self.owner, self.step = owner, step

    def result(self) -> ModelRunnerOutput:
        self.owner.in_flight -= 1
        with self.owner.device.launching():
            return self.step.result()


def serve(
    executor: Any,
    requests: list[tuple[list[int], dict[str, Any]]],
    *,
    overlap: bool,
    budget: int = 16,
    caching: bool = True,
    told: dict[int, Any] | None = None,
) -> tuple[list[list[int]], int]:
    """Tokens of each request, and the number of preemptions; a third of the requests comes later. told: takes what is
    told of their prompts."""
    config = Config(
        cache=CacheConfig(block_size=BLOCK, enable_prefix_caching=caching),
        scheduler=SchedulerConfig(
            max_num_seqs=MAX_SEQS, max_num_batched_tokens=budget, overlap="on" if overlap else "off"
        ),
    )
    core, _ = build_core(config, executor, lambda: 0.0)
    waiting = [
        AddRequest(i, prompt, SamplingParams(**{"max_tokens": 9, "temperature": 0.0, **sampling}), 0.0, fork_of=fork_of)
        for i, (prompt, sampling, fork_of) in enumerate(
            (prompt, {key: sampling[key] for key in sampling if key != "fork_of"}, sampling.get("fork_of"))
            for prompt, sampling in requests
        )
    ]
    tokens: list[list[int]] = [[] for _ in requests]
    preemptions = 0
    for _ in range(len(waiting) - len(waiting) // 3):
        core.handle(waiting.pop(0))
    for turn in range(2000):
        if core.idle and not waiting:
            break
        if waiting and (turn % 3 == 2 or core.idle):
            core.handle(waiting.pop(0))
        if (outputs := core.step()) is None:
            continue
        assert not outputs.errors
        preemptions += outputs.stats.num_new_preemptions
        if told is not None:
            told |= outputs.prompt_logprobs | outputs.embeddings
        begin = 0
        for request_id, count in zip(outputs.request_ids, outputs.token_counts, strict=True):
            tokens[request_id] += outputs.token_ids[begin : begin + count]
            begin += count
    assert core.idle
    return tokens, preemptions


class Plain:
    """engine.step.Executor on the CPU, step by step, with the attention that is everybody's oracle."""

    def __init__(self, decoder: Any) -> None:
        self.runner = make_runner(decoder, TorchAttention(BLOCK), PlainDevice(), 80)

    def start(self) -> KVCapacity:
        return KVCapacity(80, BLOCK, MAX_LEN, VOCAB, "float32", "cpu", "Llama")

    def submit(self, plan: SchedulerOutput) -> Handle:
        return self.runner.begin(plan)

    def close(self) -> None:
        pass


class PlainDevice(CpuDevice):
    def __init__(self) -> None:
        super().__init__()
        self.native = None


def alone(decoder: Any, requests: list[tuple[list[int], dict[str, Any]]]) -> list[list[int]]:
    return [serve(Plain(decoder), [request], overlap=False, caching=False)[0][0] for request in requests]


REQUESTS: list[tuple[list[int], dict[str, Any]]] = [
    ([(7 * i + 3 * j) % VOCAB for j in range(length)], sampling)
    for i, (length, sampling) in enumerate(
        [
            (5, {}),
            (17, {"temperature": 1.0, "seed": 4}),
            (1, {"presence_penalty": 1.5, "frequency_penalty": 1.0}),
            (9, {"logprobs": 2}),
            (30, {"temperature": 0.8, "seed": 5, "top_p": 0.8, "max_tokens": 16}),
            (4, {"temperature": 0.8, "seed": 6, "top_k": 7, "logit_bias": ((17, 2.0),)}),
            (12, {"allowed_token_ids": (5, 6, 7, 8, 90)}),
            (5, {"repetition_penalty": 1.3, "banned_token_ids": (3, 4)}),
            (8, {"max_tokens": 3}),
        ]
    )
]


@pytest.fixture(scope="module")
def expected(decoder: Decoder) -> list[list[int]]:
    tokens = alone(decoder, REQUESTS)
    assert len({tuple(row) for row in tokens}) == len(tokens)
    return tokens


@pytest.mark.parametrize(
    ("order", "graphs", "overlap", "num_blocks"),
    [
        *itertools.product(["late"], [True, False], [True, False], [40]),
        ("random", True, True, 40),
        ("uploads first", True, True, 40),
        ("compute first", False, True, 40),
        ("late", True, True, 16),
        ("random", True, False, 16),
    ],
)
def test_the_same_tokens_as_alone_on_the_cpu(
    decoder: Decoder, expected: list[list[int]], order: Order, graphs: bool, overlap: bool, num_blocks: int
) -> None:
    executor = Ahead(decoder, order, graphs=graphs, num_blocks=num_blocks)
    tokens, preemptions = serve(executor, REQUESTS, overlap=overlap)
    assert tokens == expected
    assert executor.most_in_flight == (2 if overlap else 1)
    assert (executor.device.num_replays > 5) is graphs
    if num_blocks == 16:
        assert preemptions > 0, "the pool was meant to be too small"


STEM = [(5 + 11 * i) % VOCAB for i in range(14)]
TELLING: list[tuple[list[int], dict[str, Any]]] = [
    (STEM, {"temperature": 1.0, "seed": 1, "prompt_logprobs": 3}),
    (STEM, {"temperature": 1.0, "seed": 2, "fork_of": 0}),
    (STEM, {"temperature": 1.0, "seed": 3, "fork_of": 0}),
    ([(4 * i) % VOCAB for i in range(22)], {"prompt_logprobs": 2, "max_tokens": 0}),
    ([(9 * i + 2) % VOCAB for i in range(19)], {"pooling": "mean", "max_tokens": 0}),
    (STEM[:9], {"pooling": "last", "max_tokens": 0}),
    ([(9 * i + 2) % VOCAB for i in range(19)], {"prompt_logprobs": 0}),
]


@pytest.mark.parametrize("order", ["late", "random", "uploads first", "compute first"])
@pytest.mark.parametrize(("overlap", "num_blocks"), [(True, 40), (False, 40), (True, 14)])
def test_prompts_are_told_of_and_shared_as_on_the_cpu(
    decoder: Decoder, order: Order, overlap: bool, num_blocks: int
) -> None:
    told: dict[int, Any] = {}
    tokens, _ = serve(Ahead(decoder, order, num_blocks=num_blocks), TELLING, overlap=overlap, budget=7, told=told)
    for index, request in enumerate(TELLING):
        told_alone: dict[int, Any] = {}
        [expected], _ = serve(Plain(decoder), [request], overlap=False, caching=False, told=told_alone)
        assert tokens[index] == expected
        assert (index in told) == (0 in told_alone)
        if "pooling" in request[1]:
            np.testing.assert_allclose(told[index], told_alone[0], atol=1e-5)
        elif 0 in told_alone:
            assert told[index].top_ids == told_alone[0].top_ids
            assert told[index].ranks == told_alone[0].ranks
            np.testing.assert_allclose(told[index].logprobs, told_alone[0].logprobs, atol=1e-5)


@st.composite
def workloads(draw: Any) -> list[tuple[list[int], dict[str, Any]]]:
    def sampling() -> dict[str, Any]:
        chosen: dict[str, Any] = {"max_tokens": draw(st.integers(1, 10))}
        if draw(st.booleans()):
            chosen |= {"temperature": 1.0, "seed": draw(st.integers(0, 99))}
        if draw(st.integers(0, 3)) == 0:
            chosen |= {"frequency_penalty": 1.5}
        return chosen

    count = draw(st.integers(1, 7))
    return [
        ([(draw(st.integers(0, 99)) + 3 * j) % VOCAB for j in range(draw(st.integers(1, 24)))], sampling())
        for _ in range(count)
    ]


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    requests=workloads(),
    order=st.sampled_from(["late", "random", "uploads first"]),
    seed=st.integers(0, 999),
    overlap=st.booleans(),
    num_blocks=st.sampled_from([14, 30]),
    budget=st.sampled_from([7, 16]),
)
def test_random_workloads(
    decoder: Decoder, requests: Any, order: Order, seed: int, overlap: bool, num_blocks: int, budget: int
) -> None:
    want = alone(decoder, requests)
    for graphs in (True, False):
        executor = Ahead(decoder, order, seed=seed, graphs=graphs, num_blocks=num_blocks)
        assert serve(executor, requests, overlap=overlap, budget=budget)[0] == want


# --- what a step does, and does not do --------------------------------------------------------------------------------


def decode_steps(executor: Ahead, count: int, rows: int = 3) -> Iterator[Handle]:
    added = [new_row(i, [5 + i, 9, 33], [1 + 4 * i, 2 + 4 * i, 3 + 4 * i, 4 + 4 * i]) for i in range(rows)]
    yield executor.submit(plan(*[(i, 0, 3, True) for i in range(rows)], added=added))
    for position in range(3, 3 + count):
        yield executor.submit(plan(*[(i, position, 1, True) for i in range(rows)]))


@pytest.mark.parametrize("graphs", [True, False])
def test_steps_are_launched_without_waiting_for_the_device(decoder: Decoder, graphs: bool) -> None:
    """Not even the second: its tokens go from the sampler to the next step on the device."""
    executor = Ahead(decoder, "late", graphs=graphs)
    handles = []
    for index, handle in enumerate(decode_steps(executor, 9)):
        handles.append(handle)
        if index < 2:  # then their results are taken
            assert executor.device.queues.num_executed == 0
        if index >= 1:
            handles[index - 1].result()
    assert executor.device.queues.num_waits_for_all == 0


def test_three_rows_are_decoded_as_four_and_captured_at_their_second_step(decoder: Decoder) -> None:
    executor = Ahead(decoder, "late")
    captures = []
    for handle in decode_steps(executor, 5):
        handle.result()
        captures.append((executor.device.num_captures, executor.device.num_replays))
    assert captures == [(0, 0), (0, 0), (1, 1), (1, 2), (1, 3), (1, 4)]
    assert [size for size, state in executor.runner._decode._states.items() if state.replay is not None] == [4]


def test_padding_writes_only_to_the_null_block(decoder: Decoder) -> None:
    executor = Ahead(decoder, "late")
    for handle in decode_steps(executor, 4):
        handle.result()
    cache = executor.runner._kv_layers[0]
    written = cache.abs().sum((1, 2, 3, 4)).nonzero().flatten().tolist()
    assert set(written) <= {0, 1, 2, 5, 6, 9, 10}


def test_a_decode_step_of_which_some_rows_sample(decoder: Decoder) -> None:
    """The last but one chunk of a prompt may be one token long."""
    results = []
    for executor in (Ahead(decoder, "late"), Plain(decoder)):
        added = [new_row(0, [5, 9, 33], [1, 2]), new_row(1, [8, 7, 6, 5, 4, 3], [3, 4])]
        steps = [
            plan((0, 0, 3, True), (1, 0, 1, False), added=added),
            *[plan((1, 1 + i, 1, False), (0, 3 + i, 1, True)) for i in range(4)],
            plan((1, 5, 1, True), (0, 7, 1, True)),
        ]
        results.append([executor.submit(step).result().token_ids for step in steps])
    assert results[0] == results[1]
    assert results[0][1] == [[], results[0][1][1]]


def test_what_a_row_in_error_leaves_is_the_same_on_both(decoder: Decoder) -> None:
    for executor in (Ahead(decoder, "late"), Plain(decoder)):
        bad = new_row(1, [4, 5], [3], allowed_token_ids=(5, 6), banned_token_ids=(5, 6))
        result = executor.submit(
            plan((0, 0, 3, True), (1, 0, 2, True), added=[new_row(0, [5, 9, 33], [1]), bad])
        ).result()
        assert list(result.errors) == [1]
        assert "no token is allowed" in result.errors[1]
        assert len(result.token_ids[0]) == 1


def test_more_rows_than_expected_grow_in_order(decoder: Decoder) -> None:
    """Under overlap, rows of finished requests are freed one plan late, so that there may be more than max_num_seqs."""
    executor = Ahead(decoder, "random", num_blocks=60)
    added = [new_row(i, [3 + i, 4], [1 + 2 * i, 2 + 2 * i]) for i in range(MAX_SEQS + 3)]
    first = executor.submit(plan(*[(i, 0, 2, True) for i in range(MAX_SEQS)], added=added[:MAX_SEQS]))
    more = range(MAX_SEQS, MAX_SEQS + 3)
    second = executor.submit(plan(*[(i, 0, 2, True) for i in more], added=added[MAX_SEQS:]))
    third = executor.submit(plan(*[(i, 2, 1, True) for i in range(MAX_SEQS)]))
    got = [first.result().token_ids, second.result().token_ids, third.result().token_ids]
    for i in range(MAX_SEQS):
        assert got[0][i] + got[2][i] == alone(decoder, [([3 + i, 4], {"max_tokens": 2})])[0]


def test_a_step_that_could_not_be_launched_frees_its_buffers(decoder: Decoder) -> None:
    executor = Ahead(decoder, "late")
    for _ in range(10):
        with pytest.raises(KeyError):
            executor.submit(plan((404, 0, 1, True)))
    assert executor.device.uploads._open == []
    for handle in decode_steps(executor, 2):
        assert len(handle.result().token_ids) == 3


# --- faults that this would find --------------------------------------------------------------------------------------


def test_a_runner_that_never_ends_its_steps_only_makes_buffers(decoder: Decoder, expected: list[list[int]]) -> None:
    """It may be slow, it must not be wrong."""
    executor = Ahead(decoder, "random")
    executor.device.end_step = lambda: None
    assert serve(executor, REQUESTS, overlap=True)[0] == expected


def test_ending_a_step_before_it_is_launched_is_found(decoder: Decoder) -> None:
    executor = Ahead(decoder, "late")
    upload = executor.device.uploads.upload

    def early(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        tensors = upload(arrays)
        executor.device.uploads.end_step()
        return tensors

    executor.device.uploads.upload = early  # type: ignore[method-assign]
    with pytest.raises(Race):  # a step whose result was taken is done, so none is
        list(decode_steps(executor, 8))


def test_results_read_before_they_arrived_are_found(decoder: Decoder) -> None:
    executor = Ahead(decoder, "late")
    executor.device.queues.wait_on_host = lambda event: None  # type: ignore[method-assign]
    with pytest.raises(Race, match="host uses memory"):
        next(decode_steps(executor, 0)).result()


def test_a_step_that_does_not_read_the_last_one_s_tokens_is_found(
    decoder: Decoder, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens above would else be equal whatever overlap did."""
    executor = Ahead(decoder, "late")
    monkeypatch.setattr(RequestRows, "commit", lambda rows, batch, token_ids: None)
    assert serve(executor, REQUESTS[:1], overlap=True)[0] != expected[:1]
