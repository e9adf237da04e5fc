"""The passes: each is one file with a function from a graph to a graph."""
