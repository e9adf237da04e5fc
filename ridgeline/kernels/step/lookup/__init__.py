"""Prompt lookup on the device: drafts of what follows, from what stood in the text before."""
