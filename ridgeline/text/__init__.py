"""The caller's side of the engine: text to token ids and back. It does not import torch, and the engine itself knows
only ids."""
