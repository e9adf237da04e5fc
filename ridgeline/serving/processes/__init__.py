"""The server's processes: the supervisor, the engine's, the API servers', and what these owe to each other."""
