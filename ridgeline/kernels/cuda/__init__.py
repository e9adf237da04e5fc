"""The parts that ladders in CUDA C++ share: instructions, a compiler for GPUs, and an emulator that runs them on a CPU.

None of it is in the wheel, and the engine imports none of it.
"""
