"""Micros: each file is a question about a GPU, with a hypothesis, predicted numbers, and the kernel that asks it.

None of it is in the wheel, and the engine imports none of it.
"""
