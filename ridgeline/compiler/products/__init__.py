"""Products of matrices: from linalg by a schedule to machine code, each step one file whose text can be printed.

```
ProductSpec ─ text.py ─▶ linalg on tensors ─ tiled.py (script of schedule.py) ─▶ loops of blocks, K and warpgroups
    ─ hopper.py ─▶ one kernel of nvvm: TMA, a ring of shared memory, wgmma ─ assemble.py ─▶ PTX ─▶ machine code
    ─ launch.py ─▶ a call by the driver
```
"""
