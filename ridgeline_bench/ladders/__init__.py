"""Ladders of kernels, rung by rung beside libraries: their problems, and the one runner that they share."""
