"""Grammars that an output is held to: checked before a request is accepted, turned into masks beside the engine."""
