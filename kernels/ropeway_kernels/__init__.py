"""Kernels of the paged KV cache, each with a readable twin in ``reference``.

Owns: numeric code on tensors. Must not know: anything of ropeway (requests, plans, models); only torch, triton, numpy and the
standard library are imported. Called by: the attention backends, and tests that compare a kernel with its reference.
"""
