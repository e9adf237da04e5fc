"""REST: OpenAI's routes and shapes, over what HTTP and gRPC share."""
