"""The rates that the machine at hand attains, measured: memory, matrix products, launches, the bus."""
