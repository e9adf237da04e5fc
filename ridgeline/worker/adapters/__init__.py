"""Adapters on the worker's side: the host's copies, the device's places, and the part of a step."""
