"""Recognition of speech: from samples to segments of text with times, as a user reads them."""
