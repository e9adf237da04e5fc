"""The common part of all ops: contracts, cases, costs, formats of numbers, compiling, launches."""
