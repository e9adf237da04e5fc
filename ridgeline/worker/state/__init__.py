"""The device memory of every kind of state, and the operation that a layer of that kind performs on it."""
