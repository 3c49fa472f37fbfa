"""The NVMe instrument: what a drive gives to the engine that trains, and what that costs in CPU.

Owns the measurement of directories: its own files, the load, the sweep over settings and the report. Uses the engine
as training does and knows nothing of training. Guarantees that no file but its own is touched, that its own are gone
afterwards however the measurement ends, and that room is left on the drive. See README.md beside this file.
"""

from swap.bench.cases import PATTERNS, Case, Measurement, Pattern, choose_best, percentile
from swap.bench.ground import Ground, require_room
from swap.bench.leftovers import remove_leftovers
from swap.bench.plan import Order, Plan, make_plan
from swap.bench.report import BenchReport
from swap.bench.sweep import run_bench

__all__ = [
    "PATTERNS",
    "BenchReport",
    "Case",
    "Ground",
    "Measurement",
    "Order",
    "Pattern",
    "Plan",
    "choose_best",
    "make_plan",
    "percentile",
    "remove_leftovers",
    "require_room",
    "run_bench",
]
