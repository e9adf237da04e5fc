"""The vocabulary that every other folder shares. It imports nothing above it, and never torch."""
