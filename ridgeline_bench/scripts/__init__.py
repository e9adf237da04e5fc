"""Measurements that are no verb of the command line, one a file: `python -m ridgeline_bench.scripts.NAME`."""
