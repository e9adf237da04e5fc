"""The settings of an engine, of a server, and of speculation, checked once."""
