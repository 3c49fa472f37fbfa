"""The drive alone: fio moving as much as it can, half reads and half writes, while a training step would run.

What it reaches is what a step's bytes are held against. Its setting is the one that was best of all in
`io_beside_fio.py`: io_uring, requests of 1 MiB in huge pages, 8 in flight.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace

import fio
import torch
from common import resident_bytes
from workloads import measure, read_job

LOAD = fio.Load("mixed", "io_uring", 1 << 20, depth=8, seconds=2.0, nbytes=4 << 30, lay_out=True)
QUICK = replace(LOAD, seconds=0.2, nbytes=64 << 20)


def main() -> None:
    """Run fio as often as the command line says; print the outcome."""
    job = read_job()
    program = shutil.which("fio")
    if program is None:
        sys.exit("fio is not installed (Debian: apt install fio)")
    path = job.directory / "fio"
    load = QUICK if job.workload == "quick" else LOAD
    rates = []

    def step(_: torch.Tensor) -> float:
        rate, _cores = fio.run(program, path, load)
        rates.append(rate)
        return 0.0

    baseline = resident_bytes()
    measure(job, step, parameters=0, baseline=baseline, details=lambda: {"rates": rates, "load": str(load)})


if __name__ == "__main__":
    main()
