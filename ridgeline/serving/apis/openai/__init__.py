"""OpenAI's API, and what vLLM, Jina and Cohere add to it: completions, chats, responses, files, embeddings, tokens."""
