"""Products of matrices, by the format of the weight."""
