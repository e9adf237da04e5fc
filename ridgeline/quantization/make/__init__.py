"""Methods that round a weight matrix to fewer bits: a matrix and what is known of its inputs in, a form to multiply
with out.

`ridgeline/compression` walks through a model with them and writes folders.
"""
