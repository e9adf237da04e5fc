"""Models as data: layers, their mixers, and the states that these keep."""
