"""Methods that round a weight matrix to fewer bits. Each takes a matrix and statistics of its inputs, and returns a
form that multiplies.

`ridgeline/compression` walks through a model with them and writes folders.
"""
