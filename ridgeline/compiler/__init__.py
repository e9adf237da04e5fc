"""A compiler for graphs of torch: what `torch.compile(model, backend="ridgeline")` runs.

```
torch.fx graph ─ capture.py ─▶ OpGraph (graph.py) ─ passes/ ─▶ OpGraph with fused nodes ─ linalg.py ─▶ MLIR
      ─ lower.py ─▶ LLVM ─ cpu.py ─▶ machine code ─ program.py ─▶ a function of tensors
```

Each pass is one file and a function from a graph to a graph; `Stages` keeps the text after each, and the verifier runs
after each. What no pass takes stays a call of torch, so every graph runs.
"""
