"""The calls of LangChain and LiteLLM. Run by check.py, in the environment that has them."""

from __future__ import annotations

import sys
from collections.abc import Callable

import litellm
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

URL = sys.argv[1] + "/v1"
MODEL = "SmolLM2-135M-Instruct"
QUESTION = "What is the capital of France?"


class City(BaseModel):
    name: str
    country: str


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"Sunny in {city}."


def chat(**more: object) -> ChatOpenAI:
    return ChatOpenAI(base_url=URL, api_key="none", model=MODEL, temperature=0, max_completion_tokens=64, **more)


def langchain_invoke() -> None:
    answer = chat().invoke(QUESTION)
    assert "Paris" in answer.content
    assert answer.usage_metadata["output_tokens"] > 0


def langchain_stream() -> None:
    assert "Paris" in "".join(chunk.content for chunk in chat().stream(QUESTION))


def langchain_tools() -> None:
    answer = chat().bind_tools([get_weather], tool_choice="get_weather").invoke("The weather in Paris?")
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather"
    assert isinstance(call["args"]["city"], str)


def langchain_structured() -> None:
    assert isinstance(chat().with_structured_output(City, method="json_schema").invoke("Name a city."), City)


def langchain_embeddings() -> None:
    embeddings = OpenAIEmbeddings(base_url=URL, api_key="none", model=MODEL, check_embedding_ctx_length=False)
    first, second = embeddings.embed_documents(["bread", "butter"])
    assert len(first) == len(second) > 100
    assert first != second


def langchain_responses() -> None:
    answer = chat(use_responses_api=True).invoke(QUESTION)
    assert "Paris" in answer.text


LITELLM = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": "none"}
ASK = {**LITELLM, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 64}


def litellm_completion() -> None:
    answer = litellm.completion(**ASK)
    assert "Paris" in answer.choices[0].message.content


def litellm_stream() -> None:
    pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**ASK, stream=True)]
    assert "Paris" in "".join(pieces)


def litellm_tools() -> None:
    function = {"name": "get_weather", "parameters": get_weather.args_schema.model_json_schema()}
    answer = litellm.completion(**ASK, tools=[{"type": "function", "function": function}], tool_choice="required")
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.tool_calls[0].function.name == "get_weather"


def litellm_embedding() -> None:
    assert len(litellm.embedding(**LITELLM, input=["bread"]).data[0]["embedding"]) > 100


CALLS: list[Callable[[], None]] = [
    langchain_invoke, langchain_stream, langchain_tools, langchain_structured, langchain_embeddings,
    langchain_responses, litellm_completion, litellm_stream, litellm_tools, litellm_embedding,
]  # fmt: skip


def main() -> int:
    failures = 0
    for call in CALLS:
        try:
            call()
            print(f"ok      {call.__name__}")
        except Exception as error:
            failures += 1
            print(f"FAILED  {call.__name__}: {type(error).__name__}: {error}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
