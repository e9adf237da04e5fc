"""Profiles that show where the time of a run goes: single ops at their real shapes, kernels, the host, memory."""
