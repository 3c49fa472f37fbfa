"""Does training with 8-bit moments converge as with float32 ones? The same model, text and batches, both curves.

Owns the two runs, one after the other, and their comparison. Does not measure time: other work on the machine changes
nothing in the result. Guarantees that both begin with the same weights and see the same batches, that the result
holds every loss of both, and that a run of fewer steps than asked for is no result.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import arguments_of, report

import tiermem
from tiermem.cli.subject import TrainOptions, find_subject
from tiermem.cli.train import Training

PACKAGES = ("torch", "transformers", "numpy")
THEME = "int8_convergence"
MOMENTS = ("float32", "int8")
LAST, WINDOW = 50, 20  # steps of the final mean, and of the running mean in the picture


def main(arguments: Sequence[str] | None = None) -> int:
    """Train twice as the command line says, print the comparison, write the result; return the exit code."""
    options = parse(arguments)
    losses = {moments: train(options, moments) for moments in MOMENTS}
    raw = {"options": {k: v for k, v in vars(options).items() if k != "results"}, "losses": losses}
    result = report(THEME, PACKAGES, comparison(options, losses), raw, options)
    if result is not None and importlib.util.find_spec("matplotlib") is not None:
        smooth = {f"{name} moments": running_mean(values, WINDOW) for name, values in losses.items()}
        draw(smooth, result.with_suffix(".svg"), title=f"{options.model}, running mean of {WINDOW} steps")
    return 0


def draw(curves: Mapping[str, Sequence[float]], path: Path, *, title: str) -> None:
    """Draw losses over steps, a line for each name."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, losses in curves.items():
        axes.plot(range(1, len(losses) + 1), losses, label=name)
    axes.set(title=title, xlabel="step", ylabel="loss")
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and the ones before it, `window` in all (fewer at the beginning)."""
    return [statistics.fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = arguments_of(__doc__, quick="a tiny model and few steps", swaps=False)
    parser.add_argument("--model", default="llama-5m", help="a preset of tiermem train")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--param-dtype", default="float32")
    options = parser.parse_args(arguments)
    if options.quick:
        options.model, options.steps, options.batch, options.seq = "llama-tiny", 6, 2, 32
    return options


def train(options: argparse.Namespace, moments: Any) -> list[float]:
    """Train from the beginning; return the loss of every step."""
    what = TrainOptions(options.model, options.steps, options.batch, options.seq, lr=options.lr, seed=options.seed)
    subject = find_subject(what)
    with tempfile.TemporaryDirectory() as directory:
        config = tiermem.Config(
            device="cpu",
            host_memory="512MiB",
            swap_dirs=[directory],
            param_dtype=options.param_dtype,
            moments=moments,
            commits=False,
        )
        training = Training(what, config, subject)
        try:
            losses = []
            for number in range(options.steps):
                losses.append(training.step(number).loss)
                if (number + 1) % LAST == 0:
                    print(f"{moments}: step {number + 1}, loss {losses[-1]:.4f}", file=sys.stderr, flush=True)
            return losses
        finally:
            training.close()


def comparison(options: argparse.Namespace, losses: dict[str, list[float]]) -> str:
    """The comparison as Markdown."""
    exact, coded = losses["float32"], losses["int8"]
    last = min(LAST, options.steps)
    final = {name: statistics.mean(values[-last:]) for name, values in losses.items()}
    apart = [abs(a - b) for a, b in zip(running_mean(exact, WINDOW), running_mean(coded, WINDOW), strict=True)]
    noise = statistics.stdev(exact[-last:]) if last > 1 else 0.0
    marks = [step for step in (1, 10, 50, 100, 200, 300, 400, 500) if step <= options.steps]
    rows = [f"| {step} | {exact[step - 1]:.4f} | {coded[step - 1]:.4f} |" for step in marks]
    what = (
        f"{options.model}, {options.param_dtype} parameters, {options.steps} steps of {options.batch} x {options.seq} "
        f"bytes of the Python standard library's sources, AdamW at {options.lr:g} with clipping, the same weights at "
        "first and the same batches."
    )
    difference = (
        f"Difference of the final means: {final['int8'] - final['float32']:+.4f} (from batch to batch the loss varies "
        f"by {noise:.4f}, one standard deviation). Running means of {WINDOW} steps are never further apart than "
        f"{max(apart):.4f}."
    )
    head = ["| step | loss, float32 moments | loss, int8 moments |", "|---|---|---|"]
    means = f"| mean of the last {last} | {final['float32']:.4f} | {final['int8']:.4f} |"
    return "\n".join([what, "", *head, *rows, means, "", difference])


if __name__ == "__main__":
    raise SystemExit(main())
