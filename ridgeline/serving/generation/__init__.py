"""The life of a request: it is admitted and sent to the engine, its tokens become text, and it ends."""
