"""Measurements of the rates that the machine at hand attains: memory, matrix products, launches, the bus."""
