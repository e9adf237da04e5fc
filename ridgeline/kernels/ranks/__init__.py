"""Ops in which ranks take part together."""
