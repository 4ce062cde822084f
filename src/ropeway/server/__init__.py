"""The HTTP room: the OpenAI-compatible API, and the text machinery between it and the engine.

Owns: requests as clients write them, text, streams, limits at the door. Must not know: torch, engine internals, blocks;
it reaches the engine through engine.client alone. Called by: cli.
"""
