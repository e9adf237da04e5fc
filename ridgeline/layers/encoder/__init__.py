"""Encoders of pictures: towers and what projects their output."""
