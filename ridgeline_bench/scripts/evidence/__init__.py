"""Checks of what the project's pages and stored results say about its code."""
