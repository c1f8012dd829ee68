"""Triton kernels for NVIDIA GPUs; under TRITON_INTERPRET=1 the same code runs on a CPU, slowly, for tests."""
