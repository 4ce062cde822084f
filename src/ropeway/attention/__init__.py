"""Attention backends: each reads and writes the paged KV cache through a block table."""
