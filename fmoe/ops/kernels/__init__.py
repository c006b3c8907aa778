"""Kernels where torch's own are slow or limited. Only this package may import triton, inside functions."""
