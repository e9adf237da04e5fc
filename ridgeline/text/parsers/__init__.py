"""What models write, read as it comes: content, reasoning and tool calls. Each form of it is one file."""
