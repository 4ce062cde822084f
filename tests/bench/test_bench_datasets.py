"""Every kind of dataset: lengths, sharing, the same seed, files of every format and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_fakes import tokenizer

from ropeway.bench.datasets import (
    AZURE_QUANTILES,
    DATASET_NAMES,
    FILE_DATASETS,
    DatasetOptions,
    SampleRequest,
    azure_lengths,
    load_dataset,
)
from ropeway.errors import ConfigError

GENERATED = [name for name in DATASET_NAMES if name not in FILE_DATASETS]


def load(seed: int = 0, with_tokenizer: bool = True, **options: Any) -> list[SampleRequest]:
    return load_dataset(
        DatasetOptions(**options),
        vocab_size=tokenizer().vocab_size + 50,  # models pad their embedding
        tokenizer=tokenizer() if with_tokenizer else None,
        rng=np.random.default_rng(seed),
    )


def lengths(samples: list[SampleRequest]) -> list[tuple[int, int]]:
    return [(sample.prompt_len, sample.output_len) for sample in samples]


@pytest.mark.parametrize("name", GENERATED)
def test_the_seed_decides(name: str) -> None:
    options = {"dataset_name": name, "num_prompts": 20, "random_range_ratio": 0.5, "max_total_len": 300}
    first = load(**options)
    assert len(first) == 20
    assert first == load(**options)
    assert first != load(seed=1, **options)
    for sample in first:
        assert sample.prompt_token_ids is not None
        assert (sample.prompt, sample.messages, sample.arrival) == (None, None, None)
        assert sample.prompt_len == len(sample.prompt_token_ids)
        assert sample.output_len >= 1
        assert all(tokenizer().is_known(token) for token in sample.prompt_token_ids)
        assert not tokenizer().special_ids.intersection(sample.prompt_token_ids)


def test_random_defaults() -> None:
    samples = load(num_prompts=3)
    assert lengths(samples) == [(1024, 128)] * 3
    assert len({tuple(sample.prompt_token_ids or ()) for sample in samples}) == 3


def test_random_lengths_stay_in_the_range_and_fill_it() -> None:
    samples = load(num_prompts=3000, random_input_len=10, random_output_len=5, random_range_ratio=0.3)
    assert {sample.prompt_len for sample in samples} == set(range(7, 14))
    assert {sample.output_len for sample in samples} == set(range(3, 8))


def test_random_prefix_is_shared_and_comes_on_top() -> None:
    samples = load(num_prompts=5, random_input_len=20, random_prefix_len=30)
    assert {sample.prompt_len for sample in samples} == {50}
    assert len({tuple((sample.prompt_token_ids or [])[:30]) for sample in samples}) == 1
    assert len({tuple((sample.prompt_token_ids or [])[30:]) for sample in samples}) == 5


def test_prefix_repetition() -> None:
    samples = load(
        dataset_name="prefix_repetition",
        num_prompts=22,
        prefix_repetition_prefix_len=8,
        prefix_repetition_suffix_len=6,
        prefix_repetition_num_prefixes=4,
        prefix_repetition_output_len=9,
    )
    assert lengths(samples) == [(14, 9)] * 22
    prefixes = [tuple((sample.prompt_token_ids or [])[:8]) for sample in samples]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [5, 5, 6, 6]
    assert prefixes[:4] != list(dict.fromkeys(prefixes))  # in random order
    with pytest.raises(ConfigError, match="num-prefixes"):
        load(dataset_name="prefix_repetition", num_prompts=3)


@pytest.mark.parametrize(
    ("name", "means", "quantiles"),
    [  # of the traces themselves, not of the fit
        ("azure-conv", (1155, 211), {50: (1020, 129), 90: (2735, 424), 99: (4142, 601)}),
        ("azure-code", (2048, 28), {50: (1469, 13), 90: (5194, 55), 99: (7436, 252)}),
    ],
)
def test_azure_lengths_are_those_of_the_traces(
    name: str, means: tuple[int, int], quantiles: dict[int, tuple[int, int]]
) -> None:
    drawn = np.array(azure_lengths(name, 100_000, np.random.default_rng(0)))
    assert drawn.mean(axis=0) == pytest.approx(means, rel=0.05)
    for wanted, values in quantiles.items():
        assert np.percentile(drawn, wanted, axis=0) == pytest.approx(values, rel=0.05)
    inputs, outputs = AZURE_QUANTILES[name]
    for column, values in zip(drawn.T, (inputs, outputs), strict=True):
        assert values[0] <= column.min()
        assert column.max() <= values[-1]
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 0.02


def test_anyscale_outputs_are_exponential_under_a_cap() -> None:
    drawn = np.array(lengths(load(dataset_name="anyscale-exp", num_prompts=10_000, anyscale_input_len=4)))
    assert set(drawn[:, 0]) == {4}
    assert drawn[:, 1].mean() == pytest.approx(128, rel=0.03)
    assert drawn[:, 1].std() == pytest.approx(128, rel=0.03)
    capped = load(dataset_name="anyscale-exp", num_prompts=2000, anyscale_input_len=4, anyscale_max_output_len=32)
    assert max(sample.output_len for sample in capped) == 32
    # P(X > 31) of an exponential distribution with mean 128
    assert np.mean([sample.output_len == 32 for sample in capped]) == pytest.approx(np.exp(-31 / 128), abs=0.03)


def test_nano_is_uniform() -> None:
    drawn = np.array(lengths(load(dataset_name="nano", num_prompts=5000)))
    assert drawn.min(axis=0).tolist() == [100, 100]
    assert drawn.max(axis=0).tolist() == [1024, 1024]
    assert drawn.mean(axis=0) == pytest.approx((562, 562), rel=0.03)


def test_prompts_are_cut_so_that_the_answer_fits() -> None:
    options = {"dataset_name": "anyscale-exp", "anyscale_mean_output_len": 300, "num_prompts": 200}
    drawn = lengths(load(**options, anyscale_input_len=500, max_total_len=600))
    assert drawn == [(min(500, 600 - output_len), output_len) for _, output_len in drawn]
    assert max(output_len for _, output_len in drawn) == 599
    assert max(input_len for input_len, _ in drawn) == 500


# Forms


@pytest.mark.parametrize("form", ["text", "chat"])
def test_prompts_as_text_have_the_same_number_of_tokens(form: Any) -> None:
    for sample in load(num_prompts=10, random_input_len=100, random_prefix_len=20, prompt_form=form):
        text = sample.prompt
        if form == "chat":
            assert sample.messages is not None
            assert [message["role"] for message in sample.messages] == ["user"]
            text = sample.messages[0]["content"]
        assert (sample.prompt is None, sample.messages is None) == (form == "chat", form == "text")
        assert sample.prompt_token_ids is None
        assert text is not None
        assert sample.prompt_len == len(tokenizer().encode(text)) == 120


def test_ids_need_no_tokenizer() -> None:
    (sample,) = load(num_prompts=1, with_tokenizer=False)
    assert sample.prompt_len == 1024
    for options in ({"prompt_form": "chat"}, {"dataset_name": "custom", "dataset_path": "x"}):
        with pytest.raises(ConfigError, match="needs a tokenizer"):
            load(with_tokenizer=False, **options)


# Files


def turns(question: Any, answer: Any) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}


@pytest.fixture
def sharegpt(tmp_path: Path) -> str:
    entries = [
        turns("What is a ropeway made of, and why?", "Steel, mostly, as cabins are heavy."),
        turns("Why", "Because it is so, and has always been."),  # the question is too short
        turns("Where does it go, if it goes at all?", "Up"),  # the answer is
        {"conversations": [{"from": "human", "value": "Alone with a question of some length"}]},
        turns(" word" * 2000, "Far too long a question, this one was."),
        turns("Short question, but not too short", " word" * 2500),
        turns(None, "no question"),
        ["not an object"],
        turns("How fast does a cabin of it move?", "About six metres a second, all told."),
    ]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(entries))
    return str(path)


def test_sharegpt_takes_first_turns_of_fitting_length(sharegpt: str) -> None:
    samples = load(dataset_name="sharegpt", dataset_path=sharegpt, prompt_form="text", num_prompts=2)
    assert {sample.prompt for sample in samples} == {
        "What is a ropeway made of, and why?",
        "How fast does a cabin of it move?",
    }
    for sample in samples:
        assert sample.prompt_len == len(tokenizer().encode(sample.prompt or ""))
    ordered = load(dataset_name="sharegpt", dataset_path=sharegpt, num_prompts=2, disable_shuffle=True)
    assert ordered[0].output_len == len(tokenizer().encode("Steel, mostly, as cabins are heavy."))
    assert ordered[0].prompt_token_ids == tokenizer().encode("What is a ropeway made of, and why?")


def test_sharegpt_is_repeated_unless_told_otherwise(sharegpt: str) -> None:
    options = {"dataset_name": "sharegpt", "dataset_path": sharegpt, "num_prompts": 7}
    assert len(load(**options)) == 7
    assert len(load(**options, no_oversample=True)) == 2


def test_sharegpt_with_a_fixed_output_length_keeps_short_answers(sharegpt: str) -> None:
    options = {"dataset_name": "sharegpt", "dataset_path": sharegpt, "num_prompts": 9}
    samples = load(**options, sharegpt_output_len=50, no_oversample=True)
    assert {sample.output_len for sample in samples} == {50}
    assert len(samples) == 4


@pytest.fixture
def custom(tmp_path: Path) -> str:
    path = tmp_path / "custom.jsonl"
    path.write_text('{"prompt": "One", "output_tokens": 5}\n\n{"prompt": "Two words", "output_tokens": "6"}\n')
    return str(path)


def test_custom(custom: str) -> None:
    options = {"dataset_name": "custom", "dataset_path": custom, "num_prompts": 2, "disable_shuffle": True}
    rendered = load(**options, prompt_form="text")
    assert [(sample.prompt, sample.output_len) for sample in rendered] == [
        ("<user>One", 256),
        ("<user>Two words", 256),
    ]
    plain = load(**options, prompt_form="text", skip_chat_template=True, custom_output_len=-1)
    assert [(sample.prompt, sample.output_len) for sample in plain] == [("One", 5), ("Two words", 6)]
    chat = load(**options, prompt_form="chat", custom_output_len=3)
    assert [sample.messages for sample in chat] == [
        [{"role": "user", "content": "One"}],
        [{"role": "user", "content": "Two words"}],
    ]


TRACES = {
    "vidur.csv": "arrived_at,num_prefill_tokens,num_decode_tokens\n5.0,30,3\n5.5,40,4\n7.25,50,5\n",
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.5000000,30,3\n2023-11-16 18:15:47.0000000,40,4\n2023-11-16 18:15:48.7500000,50,5\n",
    "lines.jsonl": '{"timestamp": 9, "input_length": 50, "output_length": 5}\n'
    '{"timestamp": 6.75, "input_length": 30, "output_length": 3}\n'
    '{"timestamp": 7.25, "input_length": 40, "output_length": 4}\n',
}


@pytest.mark.parametrize("name", TRACES)
def test_timed_traces(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(TRACES[name])
    samples = load(dataset_name="timed_trace", dataset_path=str(path))
    assert lengths(samples) == [(30, 3), (40, 4), (50, 5)]
    assert [sample.arrival for sample in samples] == [0.0, 0.5, 2.25]
    scaled = load(dataset_name="timed_trace", dataset_path=str(path), timed_trace_sec_multiplier=0.5, num_prompts=2)
    assert [sample.arrival for sample in scaled] == [0.0, 0.25]


def test_a_trace_tells_which_prompts_share_what(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    rows = [(0, 20, [1, 2]), (1, 24, [1, 2, 3]), (2, 18, [1, 9]), (3, 40, [1])]
    path.write_text(
        "\n".join(
            json.dumps({"timestamp": at, "input_length": length, "output_length": 2, "hash_ids": ids})
            for at, length, ids in rows
        )
    )
    samples = load(dataset_name="timed_trace", dataset_path=str(path), timed_trace_chunk_hash_size=8)
    prompts = [sample.prompt_token_ids or [] for sample in samples]
    assert [len(prompt) for prompt in prompts] == [20, 24, 18, 40]
    assert prompts[0][:16] == prompts[1][:16]
    assert prompts[0][:8] == prompts[2][:8] == prompts[3][:8]
    assert prompts[0][8:16] != prompts[2][8:16]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("sharegpt", "{}", "not a sharegpt file"),
        ("sharegpt", "[", "not a sharegpt file"),
        ("sharegpt", "[]", "no usable request"),
        ("custom", '{"text": "no prompt"}', "entry 1 has no text `prompt`"),
        ("custom", "[1]", "not a custom file"),
        ("custom", "", "no usable request"),
        ("timed_trace", "a,b\n1,2\n", "entry 1 has none of timestamp"),
        ("timed_trace", "timestamp,input_length,output_length\n1,x,2\n", "'x' is not a number"),
        ("timed_trace", "timestamp,input_length,output_length\nsoon,1,2\n", "'soon' is not a time"),
        ("timed_trace", "timestamp,input_length,output_length\n1,0,2\n", "no usable request"),
    ],
)
def test_files_with_something_wrong(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(dataset_name=name, dataset_path=str(path))


def test_custom_output_lengths_must_be_there(tmp_path: Path) -> None:
    path = tmp_path / "custom.jsonl"
    path.write_text('{"prompt": "x"}')
    with pytest.raises(ConfigError, match="none of output_tokens"):
        load(dataset_name="custom", dataset_path=str(path), custom_output_len=-1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset_name": "sonnet"}, "unknown"),
        ({"dataset_name": "sharegpt"}, "needs --dataset-path"),
        ({"dataset_path": "file.json"}, "takes no --dataset-path"),
        ({"dataset_name": "custom", "dataset_path": "/no/such/file"}, "No such file"),
        ({"num_prompts": 0}, "--num-prompts must be at least 1"),
        ({"random_range_ratio": 1.0}, "range-ratio"),
        ({"random_input_len": 0}, "--random-input-len"),
        ({"max_total_len": 1}, "--max-total-len"),
        ({"custom_output_len": 0}, "--custom-output-len"),
        ({"timed_trace_sec_multiplier": 0.0}, "multiplier"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(**options)
