"""Ops, one folder each: `op.py` says what an op is, `ops.py` lists all ops, and `<op>/cost.py` counts its work without
torch."""
