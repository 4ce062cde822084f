"""Ropeway: an OpenAI-compatible LLM inference server. Importing the package loads nothing but this line."""

__version__ = "0.1.0"
