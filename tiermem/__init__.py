"""Train PyTorch models larger than memory: parameters, gradients and optimizer states are pages that move among
accelerator, host memory and NVMe files.

    config = tiermem.Config(host_memory="8GiB", swap_dirs=["/nvme/run"])  # a directory that exists
    with tiermem.deferred_init():  # parameters get no storage
        model = LlamaForCausalLM(llama_config)
    with tiermem.offload(model, config) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=3e-4)
        ...

and then the training loop as always. See README.md for more.
"""

import tiermem.own_swap  # noqa: F401 - before all others
from tiermem.config import Config
from tiermem.errors import BudgetError, CapacityError, ConfigError, InvariantError, ResumeError, TiermemError
from tiermem.optim.adamw import AdamW
from tiermem.runtime import Runtime, offload
from tiermem.stats import Statistics
from tiermem.zero3.deferred import deferred_init

__version__ = "0.1.0"

__all__ = [
    "AdamW",
    "BudgetError",
    "CapacityError",
    "Config",
    "ConfigError",
    "InvariantError",
    "ResumeError",
    "Runtime",
    "Statistics",
    "TiermemError",
    "deferred_init",
    "offload",
]
