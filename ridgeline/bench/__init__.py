"""Benchmarks: the same work through us and through peers, beside the limit; verdicts that know their noise."""
