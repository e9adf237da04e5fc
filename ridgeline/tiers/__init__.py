"""Tiers of the KV cache below the host's memory. Blocks are bytes with a name here; nothing knows what they hold."""
