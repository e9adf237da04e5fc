"""Sweeps: every implementation and every cut of an op's kernels, checked and then timed on a GPU."""
