"""How good a model's predictions are: perplexity, tasks, and what a change (a data type, a compression) costs."""
