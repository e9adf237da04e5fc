"""What becomes of a request: admitted, sent to the engine, its tokens turned into text, ended."""
