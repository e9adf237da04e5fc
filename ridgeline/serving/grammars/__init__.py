"""Grammars that an output is held to. They are checked before a request is accepted and become masks in the engine."""
