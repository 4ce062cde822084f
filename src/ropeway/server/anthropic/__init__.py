"""Anthropic's Messages API over the same engine: what its clients send, and what they expect back.

Owns: field names, the way to chat messages, the wording of answers and errors. Must not know: sockets, the engine.
Called by: routes.
"""
