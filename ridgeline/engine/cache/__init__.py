"""Host side of the KV cache: block ids only, no memory."""
