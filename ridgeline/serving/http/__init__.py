"""REST: OpenAI's routes and shapes, over what both faces share."""
