"""The attention ladder: causal attention of whole sequences, from a naive form upwards, to be read and measured.

`docs/kernels/attention-ladder.md` is its page. The engine imports none of it, and it is not in the wheel.
"""
