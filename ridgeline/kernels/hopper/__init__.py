"""The common part of kernels for Hopper."""
