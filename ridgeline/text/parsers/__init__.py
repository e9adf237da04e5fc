"""Readers of what models write, as it comes: content, reasoning and tool calls. Each form is one file."""
