"""Checking models, and rewriting them as folders of safetensors."""
