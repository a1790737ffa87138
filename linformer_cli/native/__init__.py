"""Compiled C++ for the CPU: built, loaded and given programs to run. Also tells whether there are kernels for GPUs."""
