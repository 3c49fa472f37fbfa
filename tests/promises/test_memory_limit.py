"""The memory limit used by the promises about memory is real; and training keeps within one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles_combinations import some_of
from limits import LimitedRun, run_limited, run_python_limited

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]


def test_a_child_within_its_limit_lives_and_its_peak_is_known() -> None:
    run = run_python_limited("x = bytearray(40 << 20); print(len(x))", 200 * MIB)
    assert run.completed.returncode == 0, run.completed.stderr
    assert run.completed.stdout == f"{40 * MIB}\n"
    assert run.peak_bytes is None or 40 * MIB <= run.peak_bytes <= 200 * MIB


def test_a_child_beyond_its_limit_is_killed() -> None:
    run = run_python_limited("x = bytearray(400 << 20); print(len(x))", 200 * MIB)
    assert run.was_killed
    assert run.completed.stdout == ""


def test_what_a_child_leaves_running_ends_with_its_group() -> None:
    """A group with a process in it cannot be removed: its run would be lost in the error."""
    code = "import subprocess; print(subprocess.Popen(['sleep', '60'], stdout=2, stdin=subprocess.DEVNULL).pid)"
    run = run_limited(["sh", "-c", f'"{sys.executable}" -c "{code}" 2>/dev/null'], 200 * MIB)
    assert run.completed.returncode == 0
    stat = Path("/proc", run.completed.stdout.strip(), "stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_page_cache_counts_but_gives_way(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(300 * MIB))
    code = "f = open('big', 'rb')\nwhile f.read(1 << 20): pass\nprint('read')"
    run = run_python_limited(code, 100 * MIB, cwd=tmp_path)
    assert run.completed.stdout == "read\n", run.completed.stderr
    (tmp_path / "big").unlink()


@pytest.fixture(scope="module")
def small_torch() -> None:
    """Skip where the libraries alone take most of the limit."""
    if torch.version.cuda is not None or torch.version.hip is not None:
        pytest.skip("importing a build of torch for GPUs takes more than 450 MiB; a CPU build takes 330")


# Trained in float32, for which every processor has instructions; many have none for bfloat16.
_SMALL = {  # 142 million parameters in many layers, so that a budget of twice the largest unit is small
    "model_type": "llama",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 20,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 256,
}


@pytest.mark.long
@pytest.mark.timeout(1000)
@pytest.mark.usefixtures("small_torch")
@pytest.mark.parametrize(
    ("model", "dtype", "budget", "limit", "times"),
    # Half a billion parameters are 8.6 GB of state. What the interpreter and the libraries take is the same for both.
    some_of([(_SMALL, "float32", "64MiB", 512, 4)], [("llama-537m", "bfloat16", "208MiB", 1024, 8)]),
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_states_of_many_times_the_memory_limit_train_in_it(
    tmp_path: Path, model: str | dict[str, Any], dtype: str, budget: str, limit: int, times: int
) -> None:
    """All of the process is within the limit: interpreter, libraries, activations, budget."""
    # Peak RSS is the stricter of the two measures: library pages that another process touched first are not charged to
    # this group. The budget, twice the largest unit, leaves room for what is outside it.
    config, swap = tmp_path / "config.json", tmp_path / "swap"
    swap.mkdir()
    if isinstance(model, dict):
        config.write_text(json.dumps(model))
        model = str(config)
    command = [
        *(sys.executable, "-m", "tiermem", "train", "--model", model, "--steps", "2", "--batch", "1", "--seq", "4"),
        *("--host-memory", budget, "--param-dtype", dtype, "--swap-dir", str(swap), "--json"),
    ]
    run = run_limited(command, limit * MIB, timeout_seconds=900, cwd=ROOT)
    assert run.completed.returncode == 0, run.completed.stderr
    report = json.loads(run.completed.stdout)
    assert report["state_bytes"] > 8 * report["host_memory"]
    assert report["state_bytes"] > times * limit * MIB
    assert report["peak_rss_bytes"] < limit * MIB
    assert len(report["steps"]) == 2
    assert sum(step["bytes_written"] for step in report["steps"]) > limit * MIB
    assert list(swap.iterdir()) == []


_LONG = """
import contextlib, gc, resource, sys
gc.disable()  # until all is imported: looking through that for garbage would take a second
import torch, tiermem
from torch import nn

lengths, directory, threshold = sys.argv[1].split(), sys.argv[2], "256KiB"

class Layer(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.joint, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.joint(self.norms[0](x)).unflatten(-1, (3, 3, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))

torch.manual_seed(0)
model = nn.Sequential(*(Layer() for _ in range(36)))
runtime = None
if directory:
    config = tiermem.Config(host_memory="32MiB", swap_dirs=[directory], param_dtype="float32", device="cpu")
    runtime = tiermem.offload(model, config)
optimizer = (torch.optim.AdamW if runtime is None else tiermem.AdamW)(model.parameters(), lr=1e-3)
gc.collect()
gc.freeze()
gc.enable()
for length in lengths:
    x, target = torch.randn(2, 1, int(length), 96)
    for _ in range(2):
        with contextlib.nullcontext() if runtime is None else runtime.offload_activations(threshold):
            loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(length, loss.item(), flush=True)
if runtime is not None:
    runtime.close()
"""


@pytest.mark.long
@pytest.mark.timeout(1300)
@pytest.mark.usefixtures("small_torch")
def test_a_sequence_that_plain_training_cannot_hold_trains_with_offloaded_activations(tmp_path: Path) -> None:
    # Between what the two need here, 410 to 420 MiB and 600: the C heap keeps more or less of what was freed.
    limit = 510 * MIB

    def train(lengths: str, directory: str) -> tuple[LimitedRun, list[str]]:
        """And the length of the sequence in each step that was done."""
        run = run_limited([sys.executable, "-c", _LONG, lengths, directory], limit, timeout_seconds=600, cwd=ROOT)
        return run, [line.split()[0] for line in run.completed.stdout.splitlines()]

    plain, done = train("128 1024", "")
    assert plain.was_killed
    assert done[:2] == ["128"] * 2, "it is the length that it cannot hold"
    assert len(done) < 4
    offloaded, done = train("1024", str(tmp_path))
    assert offloaded.completed.returncode == 0, offloaded.completed.stderr
    assert done == ["1024"] * 2
    assert list(tmp_path.iterdir()) == []
