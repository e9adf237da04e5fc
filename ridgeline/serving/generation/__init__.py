"""A request's life: admitted, sent to the engine, its tokens turned into text, ended."""
