"""The routes of llama.cpp's server that are not OpenAI's."""
