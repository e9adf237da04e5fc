"""Benchmarks: the same work on us and on peers, beside the limit, with verdicts that account for noise."""
