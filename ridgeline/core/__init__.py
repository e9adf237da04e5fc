"""The vocabulary every other folder shares. Imports nothing above it and never torch."""
