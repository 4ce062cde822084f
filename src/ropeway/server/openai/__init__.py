"""The OpenAI HTTP API: one module per endpoint, each between JSON on one side and sequences of token ids on the other.

Owns: field names, validation, the wording of answers. Must not know: sockets, the engine's inside. Called by: routes.
"""
