"""Compiles C++ for the CPU on first use, and tells whether compiled kernels for CPUs and GPUs are available."""
