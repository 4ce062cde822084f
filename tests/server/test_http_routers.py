"""What routers and gateways ask of a replica besides completions: rendered prompts, load, facts, caches."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from http_harness import HI, MAX_MODEL_LEN, VOCAB_SIZE, House, in_loop, says, until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@in_loop
async def test_render_gives_the_ids_that_generation_starts_from() -> None:
    house = House(says())
    async with house.http() as http:
        chat: dict[str, Any] = {"messages": HI, "temperature": 0.5, "seed": 3, "max_tokens": 7, "n": 2}
        rendered = (await http.post(f"{CHAT}/render", json=chat, headers={"x-request-id": "r1"})).json()
        assert not house.client.added
        await http.post(CHAT, json=chat)
        assert rendered["token_ids"] == house.client.added[0].prompt_token_ids
        assert rendered["prompt"] == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        assert (rendered["request_id"], rendered["model"]) == ("r1", "tiny")
        sampling = house.client.added[0].sampling
        assert rendered["sampling_params"]["temperature"] == sampling.temperature == 0.5
        assert rendered["sampling_params"]["max_tokens"] == sampling.max_tokens == 7
        assert rendered["sampling_params"]["seed"] == 3
        body = {"prompt": ["The quick", "brown"], "n": 2}
        several = (await http.post(f"{COMPLETIONS}/render", json=body)).json()
        await http.post(COMPLETIONS, json=body)
        assert [one["token_ids"] for one in several] == [r.prompt_token_ids for r in house.client.added[2::2]]
        one = (await http.post(f"{COMPLETIONS}/render", json={"prompt": [5, 6]})).json()
        assert [each["token_ids"] for each in one] == [[5, 6]]


@in_loop
async def test_render_refuses_what_generation_would_and_answers_where_that_is_full() -> None:
    gate = asyncio.Event()
    house = House(says(waits={0: gate}), max_num_queued_reqs=1)
    async with house.http() as http:
        running = asyncio.create_task(http.post(CHAT, json={"messages": HI}))
        await until(lambda: len(house.client.live) == 1)
        assert (await http.post(CHAT, json={"messages": HI})).status_code == 429
        assert (await http.post(f"{CHAT}/render", json={"messages": HI})).status_code == 200
        assert (await http.post(f"{COMPLETIONS}/render", json={"prompt": "a"})).status_code == 200
        assert (await http.post("/v1/messages/count_tokens", json={"messages": HI})).status_code == 200
        for path, body in ((f"{CHAT}/render", {"messages": []}), (f"{COMPLETIONS}/render", {"prompt": ""})):
            assert (await http.post(path, json=body)).status_code == 400
        gate.set()
        await running


@in_loop
async def test_load_facts_and_caches() -> None:
    gate = asyncio.Event()
    house = House(says(waits={0: gate}), api_key=["secret"])
    async with house.http(authorization="Bearer secret") as http:
        running = asyncio.create_task(http.post(CHAT, json={"messages": HI, "n": 2}))
        await until(lambda: len(house.client.live) == 2)
        assert (await http.get("/get_load")).json() == {"load": 1}
        gate.set()
        assert (await running).headers["x-served-by"] == socket.gethostname()
        assert (await http.get("/get_load")).json() == {"load": 0}
        model = (await http.get("/model_info")).json()
        assert (model["max_model_len"], model["vocab_size"]) == (MAX_MODEL_LEN, VOCAB_SIZE)
        assert model["served_model_names"] == ["tiny", "org/alias"]
        for path in ("/server_info", "/get_server_info"):
            response = await http.get(path)
            assert "secret" not in response.text
            assert response.json()["cache"]["block_size"] == house.config.cache.block_size
        assert (await http.get("/kv_event_sources")).json() == {"sources": []}
        assert (await http.post("/flush_cache")).status_code == 200
    assert house.client.num_prefix_resets == 1
