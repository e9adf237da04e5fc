"""The callers' side of the engine: text to token ids and back. Torch-free; the engine itself knows ids only."""
