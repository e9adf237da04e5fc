"""Adapters as PEFT stores them: their config, and their tensors in the form in which the worker multiplies."""
