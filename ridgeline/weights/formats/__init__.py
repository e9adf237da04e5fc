"""Readers of other projects' files, byte by byte with the standard library alone. Nothing in the files can run."""
