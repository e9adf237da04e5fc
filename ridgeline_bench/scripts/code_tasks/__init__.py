"""A real result of post-training: small Python tasks made from packages, and how many of them a model solves."""
