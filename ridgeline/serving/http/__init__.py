"""The server's REST side: OpenAI's routes and shapes, over the parts that HTTP and gRPC share."""
