"""Drafts of tokens to come, which steps verify: their proposers, and their form in rows."""
