"""How torch.compile's layers and other compilers treat a model: each file measures one thing."""
