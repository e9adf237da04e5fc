"""Requests, files and processes that should hurt a server, and what others notice of them."""
