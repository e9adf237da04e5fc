"""What a client may ask: from a body of JSON, within bounds, to a `GenerationRequest`."""
