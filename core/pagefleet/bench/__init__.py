"""What `pagefleet bench` measures: this engine, another one beside it, and the machine that both run on.

`synthetic` is the quick look: random prompts in this process. The rest is the `suite`: fixed workloads (`workloads`),
each engine in a process of its own (`engines`, `process`, `peers`) and all of them in turn (`compare`) over the same
weights (`variants`), the share of the machine's ceilings that each op reaches (`roofline`, `ceilings`), what static
batching would have cost (`static_batching`), and tables of it all (`report`).
"""

from pagefleet.bench.synthetic import BenchResult, Workload, raise_failures, run, summarise, table

__all__ = ["BenchResult", "Workload", "raise_failures", "run", "summarise", "table"]
