"""llama.cpp's architectures as GGUF files hold them, in our words: entries of config.json, and names of tensors."""
