"""Ops: one folder each. `op.py` says what an op is, `ops.py` lists them; `<op>/cost.py` is torch-free."""
