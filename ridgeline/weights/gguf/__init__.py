"""What GGUF files of each of llama.cpp's architectures say, in our words: config.json's entries, and tensors' names."""
