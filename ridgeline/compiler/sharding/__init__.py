"""A partitioner: a graph for one device and annotations of some tensors become a graph for each of several ranks.

```
module ─ trace.py ─▶ OpGraph ─ propagate.py ─▶ a layout of every value ─ partition.py ─▶ OpGraph of local shapes
       with collectives ─ minimise.py ─▶ fewer of them ─ overlap.py ─▶ begun early, awaited late ─ run.py ─▶ a program
```

The method is GSPMD's (Xu et al., arXiv 2105.04663). rules.py says of every op which dimensions belong together, and all
passes follow from that. check.py verifies a partitioned graph, and report.py says and draws what became of it.
"""
