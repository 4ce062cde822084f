"""The workers: they hold the model, the KV cache and a permanent row per running request, and execute plans."""
