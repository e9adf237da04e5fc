"""Measures: the machine's rates (calibrate), single ops at real shapes (ops), whole runs (profile)."""
