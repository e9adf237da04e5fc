"""The old place of the scripts, for one release: `python -m benchmarks.X` runs `ridgeline_bench.scripts.X`."""

from ridgeline_bench import scripts

__path__ = [*__path__, *scripts.__path__]
