"""Requests as clients may make them: from a body of JSON, within bounds, to a `GenerationRequest`."""
