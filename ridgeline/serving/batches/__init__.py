"""Batches of requests: files and batches on disk, and the runner that works through them while no other request
waits."""
