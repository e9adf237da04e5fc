"""The requests that clients may make: from a body of JSON, within bounds, to a `GenerationRequest`."""
