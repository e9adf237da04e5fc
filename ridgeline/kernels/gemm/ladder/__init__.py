"""The GEMM ladder: one product in CUDA C++, from a naive kernel upwards, to be read and measured.

`docs/kernels/gemm-ladder.md` is its page. The engine imports none of it, and it is not in the wheel.
"""
