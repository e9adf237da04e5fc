"""Checks of models, and their conversion to folders of safetensors."""
