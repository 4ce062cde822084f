"""A permanent row per request, and the batch gathered from the rows in each step.

Owns: RequestRows, and how a plan becomes arrays. Must not know: models, attention, how tokens are chosen.
Called by: worker.runner, in the order apply, gather, commit.

Split of state: what the host decides (tokens it knows, block tables, sampling parameters) is numpy, so that a batch is
gathered with a few vectorised operations and goes to the device in one transfer. What only the device knows, the token
that was sampled last and the counts for penalties, stays there; so the next batch can be gathered before it is known.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ropeway.attention.base import AttentionMetadata
from ropeway.engine.step import NewRow, SchedulerOutput
from ropeway.protocol import SamplingParams
from ropeway.worker.device import Device
from ropeway.worker.sampler import Penalties, SamplingInputs, noise_keys

_ROW = np.dtype(
    [
        ("num_known", np.int64),  # tokens that the host knew when the row was added; later ones live on the device
        ("num_prompt", np.int64),
        ("num_blocks", np.int64),
        ("min_tokens", np.int64),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("top_k", np.int64),  # the vocabulary size for no bound
        ("seed", np.uint64),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("repetition", np.float32),
        ("penalty_slot", np.int64),  # -1: no penalties
    ]
)


@dataclass(slots=True)
class _Extras:
    """The rarely used parameters of a row. Token ids are int64 and inside the vocabulary."""

    allowed: Tensor | None  # [n] on the device
    banned: np.ndarray  # [n]
    ends: np.ndarray  # [n]; masked below min_tokens
    bias_ids: np.ndarray  # [n]
    bias_values: np.ndarray  # [n] float32
    logprobs: int | None


@dataclass(slots=True)
class InputBatch:
    """One step's tensors, on the device. Rows are the plan's, in its order."""

    input_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    logits_indices: Tensor  # [num_sampled] int64; last token of each row that samples
    meta: AttentionMetadata
    sampled: list[int]  # [num_sampled]; the plan's index of each row that samples
    sampled_rows: Tensor  # [num_sampled] int64; their permanent rows
    sampling: SamplingInputs


@dataclass(slots=True)
class _Decoding:
    """A batch in which each row had one token and sampled. As long as the rows stay the same, the next batch is this one,
    a token further: it is made in its place."""

    batch: InputBatch
    request_ids: list[int]
    num_tokens: list[int]  # all 1
    samples: list[bool]  # all true
    next_positions: list[int]
    is_greedy: bool  # nothing but the best token is asked for
    rows: np.ndarray  # [num_reqs] int64
    positions: np.ndarray  # [num_reqs] int64, the memory of the batch's
    slots: np.ndarray  # [num_reqs] int64, likewise
    seq_lens: np.ndarray  # [num_reqs] int32, likewise

    def continues_with(self, plan: SchedulerOutput) -> bool:
        return (
            plan.start_positions == self.next_positions
            and plan.request_ids == self.request_ids
            and plan.num_tokens == self.num_tokens
            and plan.samples == self.samples
        )


@dataclass(slots=True)
class RequestRows:
    capacity: int  # rows at first; more are made when needed
    max_model_len: int
    block_size: int
    vocab_size: int
    device: Device
    index: dict[int, int] = field(default_factory=dict)  # request id -> row
    last_token: Tensor = field(init=False)  # [capacity] int64, on the device; sampled last
    _free: list[int] = field(init=False)
    _params: np.ndarray = field(init=False)  # [capacity] of _ROW
    _tokens: np.ndarray = field(init=False)  # [capacity, max_model_len] int32; the first num_known are valid
    _block_table: np.ndarray = field(init=False)  # [capacity, max blocks of a sequence] int32; 0 beyond num_blocks
    _extras: dict[int, _Extras] = field(default_factory=dict)  # by row
    _penalties: _PenaltyTable = field(init=False)
    _decoding: _Decoding | None = None  # the last batch, if it was one

    def __post_init__(self) -> None:
        # numpy's zeros are untouched pages, so room for the longest sequence in every row costs nothing until used.
        self._params = np.zeros(self.capacity, dtype=_ROW)
        self._tokens = np.zeros((self.capacity, self.max_model_len), dtype=np.int32)
        self._block_table = np.zeros((self.capacity, -(-self.max_model_len // self.block_size)), dtype=np.int32)
        self.last_token = torch.zeros(self.capacity, dtype=torch.int64, device=self.device.torch_device)
        self._free = list(range(self.capacity - 1, -1, -1))
        self._penalties = _PenaltyTable(self.vocab_size, self.device)

    # --- rows come and go ---------------------------------------------------------------------------------------------

    def apply(self, plan: SchedulerOutput) -> None:
        """Free the removed rows, fill the added ones, append new blocks."""
        if plan.removed or plan.added:
            self._decoding = None
        for request_id in plan.removed:
            self._remove(request_id)
        for new in plan.added:
            self._add(new)
        for request_id, block_ids in plan.new_blocks.items():
            self._append_blocks(self.index[request_id], block_ids)

    def _remove(self, request_id: int) -> None:
        row = self.index.pop(request_id, None)
        if row is None:  # aborted before it ever ran
            return
        params = self._params[row]
        self._block_table[row, : params["num_blocks"]] = 0
        if params["penalty_slot"] >= 0:
            self._penalties.release(int(params["penalty_slot"]))
        self._extras.pop(row, None)
        self._free.append(row)

    def _add(self, new: NewRow) -> None:
        assert new.request_id not in self.index, f"request {new.request_id} already has a row"
        if not self._free:
            self._grow()
        row = self.index[new.request_id] = self._free.pop()
        sampling = new.sampling
        self._tokens[row, : len(new.token_ids)] = new.token_ids
        params = self._params[row]
        params["num_known"] = len(new.token_ids)
        params["num_prompt"] = new.num_prompt_tokens
        params["num_blocks"] = 0
        params["min_tokens"] = sampling.min_tokens
        params["temperature"] = sampling.temperature
        params["top_p"] = sampling.top_p
        params["min_p"] = sampling.min_p
        params["top_k"] = min(sampling.top_k, self.vocab_size) or self.vocab_size
        params["seed"] = sampling.seed
        params["presence"] = sampling.presence_penalty
        params["frequency"] = sampling.frequency_penalty
        params["repetition"] = sampling.repetition_penalty
        params["penalty_slot"] = -1
        if sampling.needs_penalties:
            tokens = np.asarray(new.token_ids, dtype=np.int64)
            prompt, outputs = np.split(tokens, [new.num_prompt_tokens])
            params["penalty_slot"] = self._penalties.take(prompt, outputs)
        if (extras := self._make_extras(sampling)) is not None:
            self._extras[row] = extras
        self._append_blocks(row, new.block_ids)

    def _append_blocks(self, row: int, block_ids: list[int]) -> None:
        begin = int(self._params[row]["num_blocks"])
        self._block_table[row, begin : begin + len(block_ids)] = block_ids
        self._params[row]["num_blocks"] = begin + len(block_ids)

    def _make_extras(self, sampling: SamplingParams) -> _Extras | None:
        if not (
            sampling.min_tokens
            or sampling.logit_bias
            or sampling.banned_token_ids
            or sampling.allowed_token_ids is not None
            or sampling.logprobs is not None
        ):
            return None

        def inside(ids: object) -> np.ndarray:
            array = np.asarray(ids, dtype=np.int64).reshape(-1)
            return array[(array >= 0) & (array < self.vocab_size)]

        allowed = None
        if sampling.allowed_token_ids is not None:
            allowed = self.device.upload({"allowed": inside(sampling.allowed_token_ids)})["allowed"].clone()
        bias = {token: value for token, value in sampling.logit_bias if 0 <= token < self.vocab_size}
        return _Extras(
            allowed=allowed,
            banned=inside(sampling.banned_token_ids),
            # Where a grammar rules, an end may be all that it allows: worker.constraints knows.
            ends=inside(() if sampling.grammar else sampling.eos_token_ids + sampling.stop_token_ids),
            bias_ids=np.array(list(bias), dtype=np.int64),
            bias_values=np.array(list(bias.values()), dtype=np.float32),
            logprobs=sampling.logprobs,
        )

    def _grow(self) -> None:
        """Twice the rows. Under overlap, rows of finished requests are freed one plan late."""
        more = self.capacity
        self._params = np.concatenate([self._params, np.zeros(more, dtype=_ROW)])
        self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
        self._block_table = np.concatenate([self._block_table, np.zeros_like(self._block_table)])
        self.last_token = torch.cat([self.last_token, torch.zeros_like(self.last_token)])
        self._free.extend(range(self.capacity + more - 1, self.capacity - 1, -1))
        self.capacity += more

    # --- one step -----------------------------------------------------------------------------------------------------

    def gather(self, plan: SchedulerOutput, padded: int = 0) -> InputBatch:
        """The step's tensors; the plan has at least one row and has been applied. They hold until the next is gathered.

        padded: for a plan whose rows have one token each, the number of rows that the model is to see; those beyond the
        plan's have seq_lens 0 and slot -1, and sample nothing.
        """
        if self._decoding is not None and not padded and self._decoding.continues_with(plan):
            return self._gather_next(plan, self._decoding)
        num_reqs = len(plan.request_ids)
        index = self.index
        rows = np.fromiter((index[request_id] for request_id in plan.request_ids), np.int64, num_reqs)
        starts = np.array(plan.start_positions, dtype=np.int64)
        counts = np.array(plan.num_tokens, dtype=np.int64)
        query_start_loc = np.zeros(num_reqs + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start_loc[1:])
        num_tokens = int(query_start_loc[-1])
        seq_lens = starts + counts

        token_rows, positions = rows, starts
        if num_tokens != num_reqs:
            token_rows = np.repeat(rows, counts)
            positions = np.arange(num_tokens) - np.repeat(query_start_loc[:-1] - starts, counts)
        slots = self._slots(token_rows, positions)
        # A token that the host does not know is the one sampled last in its row, still on the device.
        known = positions < self._params["num_known"][token_rows]
        input_ids = np.where(known, self._tokens[token_rows, positions], 0).astype(np.int64)
        sampled_last = np.flatnonzero(~known)
        max_seq_len = int(seq_lens.max())
        max_blocks = -(-max_seq_len // self.block_size)

        sampled = np.flatnonzero(np.array(plan.samples, dtype=bool))
        query_lens, kv_lens = counts.astype(np.int32), seq_lens.astype(np.int32)
        block_table = self._block_table[rows, :max_blocks]
        if padded > num_reqs:
            assert num_tokens == num_reqs, "only a step of one token per row is padded"
            more = padded - num_reqs
            input_ids, positions = np.pad(input_ids, (0, more)), np.pad(positions, (0, more))
            kv_lens = np.pad(kv_lens, (0, more))
            slots = np.pad(slots, (0, more), constant_values=-1)
            query_lens = np.pad(query_lens, (0, more), constant_values=1)
            query_start_loc = np.arange(padded + 1, dtype=np.int32)
            block_table = np.pad(block_table, ((0, more), (0, 0)))
        arrays: dict[str, np.ndarray] = {
            "input_ids": input_ids,
            "positions": positions,
            "slot_mapping": slots,
            "query_start_loc": query_start_loc,
            "seq_lens": kv_lens,
            "block_table": block_table,
            "logits_indices": query_start_loc[sampled + 1].astype(np.int64) - 1,
            "sampled_rows": rows[sampled],
            "sampled_last": sampled_last,
            "sampled_last_rows": token_rows[sampled_last],
        }
        sampling = SamplingInputs(num_rows=len(sampled))
        if len(sampled):
            self._gather_sampling(rows[sampled], seq_lens[sampled], arrays, sampling)
        tensors = self.device.upload(arrays)
        if len(sampled_last):
            tensors["input_ids"][tensors["sampled_last"]] = self.last_token[tensors["sampled_last_rows"]]
        if len(sampled):
            self._attach_sampling(tensors, sampling)
        batch = InputBatch(
            input_ids=tensors["input_ids"],
            positions=tensors["positions"],
            logits_indices=tensors["logits_indices"],
            meta=AttentionMetadata(
                query_start_loc=tensors["query_start_loc"],
                seq_lens=tensors["seq_lens"],
                block_table=tensors["block_table"],
                slot_mapping=tensors["slot_mapping"],
                num_reqs=len(query_lens),
                num_tokens=len(input_ids),
                max_query_len=int(counts.max()),
                max_seq_len=max_seq_len,
                host_query_lens=query_lens,
                host_seq_lens=kv_lens,
            ),
            sampled=sampled.tolist(),
            sampled_rows=tensors["sampled_rows"],
            sampling=sampling,
        )
        self._decoding = None
        # A device that runs ahead may not have read this batch when the next is made.
        if num_tokens == num_reqs == len(sampled) and not padded and not self.device.runs_ahead:
            extras = not self._extras.keys().isdisjoint(rows.tolist())
            self._decoding = _Decoding(
                batch=batch,
                request_ids=plan.request_ids,
                num_tokens=plan.num_tokens,
                samples=plan.samples,
                next_positions=seq_lens.tolist(),
                is_greedy=not (extras or "random_rows" in arrays or "penalty_rows" in arrays),
                rows=rows,
                positions=positions,
                slots=slots,
                seq_lens=kv_lens,
            )
        return batch

    def _gather_next(self, plan: SchedulerOutput, last: _Decoding) -> InputBatch:
        batch, meta = last.batch, last.batch.meta
        last.next_positions = [start + 1 for start in plan.start_positions]
        last.positions += 1
        last.slots += 1
        last.seq_lens += 1
        meta.max_seq_len += 1
        if plan.new_blocks or not (last.positions % self.block_size).all():  # a row goes on in another block
            last.slots[:] = self._slots(last.rows, last.positions)
            block_table = self._block_table[last.rows, : -(-meta.max_seq_len // self.block_size)]
            meta.block_table = self.device.upload({"block_table": block_table})["block_table"]
        torch.index_select(self.last_token, 0, batch.sampled_rows, out=batch.input_ids)
        batch.sampling = SamplingInputs(num_rows=len(last.rows))
        if not last.is_greedy:
            arrays: dict[str, np.ndarray] = {}
            self._gather_sampling(last.rows, last.seq_lens, arrays, batch.sampling)
            self._attach_sampling(self.device.upload(arrays), batch.sampling)
        return batch

    def _slots(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Where the KV of the tokens ``positions`` ``[n]`` of ``rows`` ``[n]`` goes."""
        blocks = self._block_table[rows, positions // self.block_size].astype(np.int64)
        slots: np.ndarray = blocks * self.block_size + positions % self.block_size
        return slots

    def _gather_sampling(
        self, rows: np.ndarray, seq_lens: np.ndarray, arrays: dict[str, np.ndarray], sampling: SamplingInputs
    ) -> None:
        """Host half: add to ``arrays`` what these rows ask for, and nothing else."""
        params = self._params[rows]
        output_positions = seq_lens - params["num_prompt"]  # index of the token to be sampled among the generated ones
        random = np.flatnonzero(params["temperature"] > 0)
        if len(random):
            chosen = params[random]
            arrays["random_rows"] = random
            arrays["temperature"] = chosen["temperature"][:, None]
            arrays["noise_keys"] = noise_keys(chosen["seed"], output_positions[random])
            filtered = (chosen["top_k"] < self.vocab_size) | (chosen["top_p"] < 1) | (chosen["min_p"] > 0)
            if filtered.any():
                arrays["filtered"] = np.flatnonzero(filtered)
                if not filtered.all():
                    arrays["unfiltered"] = np.flatnonzero(~filtered)
                for name in ("top_k", "top_p", "min_p"):
                    arrays[name] = chosen[name][filtered][:, None]
        penalised = np.flatnonzero(params["penalty_slot"] >= 0)
        if len(penalised):
            arrays["penalty_rows"] = penalised
            arrays["penalty_slots"] = params["penalty_slot"][penalised]
            for name in ("presence", "frequency", "repetition"):
                arrays[name] = params[name][penalised][:, None]
        if self._extras:
            self._gather_extras(rows, params["min_tokens"] > output_positions, arrays, sampling)

    def _gather_extras(
        self, rows: np.ndarray, below_minimum: np.ndarray, arrays: dict[str, np.ndarray], sampling: SamplingInputs
    ) -> None:
        banned: list[tuple[int, np.ndarray]] = []
        bias: list[tuple[int, _Extras]] = []
        for i, row in enumerate(rows.tolist()):
            extras = self._extras.get(row)
            if extras is None:
                continue
            if extras.allowed is not None:
                sampling.allowed.append((i, extras.allowed))
            if len(extras.banned):
                banned.append((i, extras.banned))
            if below_minimum[i] and len(extras.ends):
                banned.append((i, extras.ends))
            if len(extras.bias_ids):
                bias.append((i, extras))
            if extras.logprobs is not None:
                sampling.logprobs.append((i, extras.logprobs))
        if banned:
            arrays["banned_rows"] = np.repeat([i for i, _ in banned], [len(ids) for _, ids in banned])
            arrays["banned_ids"] = np.concatenate([ids for _, ids in banned])
        if bias:
            arrays["bias_rows"] = np.repeat([i for i, _ in bias], [len(extras.bias_ids) for _, extras in bias])
            arrays["bias_ids"] = np.concatenate([extras.bias_ids for _, extras in bias])
            arrays["bias_values"] = np.concatenate([extras.bias_values for _, extras in bias])

    def _attach_sampling(self, tensors: dict[str, Tensor], sampling: SamplingInputs) -> None:
        """Device half: the uploaded arrays under the names that the sampler knows."""
        for name in ("random_rows", "temperature", "noise_keys", "filtered", "unfiltered", "top_k", "top_p", "min_p"):
            setattr(sampling, name, tensors.get(name))
        if "banned_rows" in tensors:
            sampling.banned = tensors["banned_rows"], tensors["banned_ids"]
        if "bias_rows" in tensors:
            sampling.bias = tensors["bias_rows"], tensors["bias_ids"], tensors["bias_values"]
        if "penalty_rows" in tensors:
            sampling.penalties = Penalties(
                rows=tensors["penalty_rows"],
                slots=tensors["penalty_slots"],
                presence=tensors["presence"],
                frequency=tensors["frequency"],
                repetition=tensors["repetition"],
                output_counts=self._penalties.output_counts,
                in_prompt=self._penalties.in_prompt,
            )

    def commit(self, batch: InputBatch, token_ids: Tensor) -> None:
        """Keep the sampled tokens ``[num_sampled]`` for the next step."""
        self.last_token.index_copy_(0, batch.sampled_rows, token_ids)
        if (penalties := batch.sampling.penalties) is not None:
            penalties.output_counts[penalties.slots, token_ids[penalties.rows]] += 1


class _PenaltyTable:
    """Token counts on the device, only for requests that have penalties; grows with the most there ever were."""

    def __init__(self, vocab_size: int, device: Device) -> None:
        place = device.torch_device
        self.output_counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=place)  # [slots, vocab]
        self.in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=place)  # [slots, vocab]
        self._device = device
        self._free: list[int] = []

    def take(self, prompt: np.ndarray, outputs: np.ndarray) -> int:
        """A slot filled with these tokens."""
        if not self._free:
            size = self.output_counts.shape[0]
            more = max(4, size)
            self._free.extend(range(size + more - 1, size - 1, -1))
            self.output_counts, self.in_prompt = (
                torch.cat([table, table.new_zeros(more, table.shape[1])])
                for table in (self.output_counts, self.in_prompt)
            )
        slot = self._free.pop()
        ids, counts = np.unique(outputs, return_counts=True)
        tokens = self._device.upload({"prompt": prompt, "ids": ids, "counts": counts.astype(np.int32)})
        self.output_counts[slot].zero_().index_copy_(0, tokens["ids"], tokens["counts"])
        self.in_prompt[slot].zero_().index_fill_(0, tokens["prompt"], 1)
        return slot

    def release(self, slot: int) -> None:
        self._free.append(slot)


__all__ = ["InputBatch", "RequestRows"]
