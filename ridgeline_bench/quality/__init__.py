"""The quality of a model's predictions: perplexity, tasks, and the cost of a change (a data type, a compression)."""
