"""The allocator of a GPU's memory in torch: its rules predicted and measured, and a server and a training step seen
through it."""
