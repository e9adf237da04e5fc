"""Drafts of tokens to come, which steps verify: who makes them, and how rows carry them."""
