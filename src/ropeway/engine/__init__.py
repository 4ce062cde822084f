"""The engine: decides what each model step computes. Pure Python; never imports torch, never sees text."""
