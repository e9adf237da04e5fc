"""Ops whose limit is memory, in CUDA C++ from naive to fast: vector add, transpose, reduction, SiLU, softmax, norms.

None of it is in the wheel, and the engine imports none of it.
"""
