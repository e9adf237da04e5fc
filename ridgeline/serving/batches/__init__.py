"""Batches of requests: their lines, and the runner that works through them while no other request waits."""
