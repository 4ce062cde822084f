"""GET /v1/models and /v1/models/{id}, and what routers ask about the model and the server.

Owns: the names the API answers to. Must not know: the engine. Called by: routes, serve (the name for
metrics).
"""

from __future__ import annotations

import dataclasses
from importlib.metadata import version
from typing import Any

from ropeway.config import Config
from ropeway.errors import RequestError
from ropeway.server.service import Service

DEMO_NAME = "SmolLM2-135M-Instruct"


def served_names(config: Config) -> tuple[str, ...]:
    """As configured, else the model as it was given. The first is the one reported back."""
    return config.model.served_model_name or (config.model.model or DEMO_NAME,)


def list_models(service: Service) -> dict[str, Any]:
    return {"object": "list", "data": [_card(service, name) for name in service.names]}


def get_model(service: Service, name: str) -> dict[str, Any]:
    """Raises RequestError(404)."""
    if name not in service.names:
        raise RequestError(
            f"The model '{name[:200]}' does not exist.", status=404, param="model", code="model_not_found"
        )
    return _card(service, name)


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "ropeway",
        "root": service.config.model.model or DEMO_NAME,
        "parent": None,
        "max_model_len": service.limits.max_model_len,
    }


def describe_model(service: Service) -> dict[str, Any]:
    """Raises RequestError(503) while the engine has not started."""
    limits = service.limits
    return {
        "model_path": service.config.model.model or DEMO_NAME,
        "served_model_names": list(service.names),
        "max_model_len": limits.max_model_len,
        "vocab_size": limits.vocab_size,
        "eos_token_ids": list(limits.eos_token_ids),
        "is_generation": True,
        "has_chat_template": service.tokenizer.has_chat_template,
        "preferred_sampling_params": dict(limits.defaults),
    }


def describe_server(service: Service) -> dict[str, Any]:
    """Every setting but the keys, with the version and the state."""
    settings = dataclasses.asdict(service.config)
    settings["server"] |= {"api_key": len(service.config.server.api_key), "ssl_keyfile": None}
    return {"version": version("ropeway"), "status": service.lifecycle.phase.value, **settings}
