"""Attention, by where keys and values lie."""
