"""Tokens sent to the ranks of their experts, and back."""
