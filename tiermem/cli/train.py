"""`tiermem train`: a causal language model learns from text under given budgets.

Owns the training loop of the command line and the order of its checks: everything that can be refused is refused
before anything is written. Does not know how pages move; it uses the same public face as any other user. Guarantees
that the runtime is closed however the run ends, that swap files are removed unless something is committed in them, and
that a resumed run goes on bit for bit.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import tiermem
from tiermem.cli.beginning import say_beginning
from tiermem.cli.disk import capacity_bytes, require_writable, swap_directories
from tiermem.cli.launch import Launch, launched
from tiermem.cli.presets import (
    build_model,
    convert_buffers,
    is_models_own,
    reason_of,
    recompute_activations,
)
from tiermem.cli.process_memory import peak_resident_bytes, resident_bytes
from tiermem.cli.progress import TrainProgress
from tiermem.cli.report import STATE_BYTES_PER_PARAMETER, StepReport, TrainReport
from tiermem.cli.scalars import add_step, open_scalars, require_scalars
from tiermem.cli.subject import Subject, TrainOptions, find_subject
from tiermem.cli.text import batch
from tiermem.config import resolve_host_memory
from tiermem.errors import ConfigError, ResumeError
from tiermem.memory.heap import return_large_blocks
from tiermem.memory.machine import available_host_memory
from tiermem.memory.tiers import Tier
from tiermem.runtime.commits import PendingCommit
from tiermem.settings_file import read_settings, settings_path
from tiermem.stats import StepStatistics
from tiermem.wear import Endurance, Wear, measure_wear, parse_endurance

MAX_GRAD_NORM = 1.0
SWITCH_SECONDS = 0.0005
# What a kill may cost a run that commits, unless it says how often: a commit writes all that is in memory.
COMMIT_SECONDS = 600.0
# What is left beside the budget for the C library to be free with. "auto" leaves this where the machine has it.
_ROOMY = 2 << 30
# The options that batches follow from, beside the text and the tokenizer.
_BATCHES = ("seed", "batch", "seq", "accumulate")
WARM_UP_SHARE = 0.1
FINAL_LR_SHARE = 0.1


class Training:
    """A model being trained: built from options and a configuration, stepped, closed."""

    def __init__(
        self, options: TrainOptions, config: tiermem.Config, subject: Subject, *, launch: Launch | None = None
    ) -> None:
        self.options = options
        self.launch = launch or Launch()
        self.source = subject.source
        torch.manual_seed(options.seed)
        with tiermem.deferred_init():
            self.model = build_model(subject.model_config)
        convert_buffers(self.model, subject.model_config, config.dtype)
        self.model.train()
        if options.gradient_checkpointing:
            recompute_activations(self.model)
        resume = "auto" if options.resume else False
        self.runtime = tiermem.offload(self.model, config, weights=options.weights, resume=resume)
        self.optimizer = tiermem.AdamW(
            self.model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=MAX_GRAD_NORM
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate_factor(step, options.steps)
        )
        self.done = 0
        self.computes = False  # whether the model has computed a batch
        self._committing: PendingCommit | None = None  # the latest
        self._committed = 0  # steps
        # By `perf_counter`; so the first step is committed, and a drive that fails is found.
        self._committed_at = -math.inf
        try:
            if self.runtime.committed is not None:
                self._go_on(self.runtime.committed)
        except BaseException:
            self.close()
            raise

    def _go_on(self, committed: Any) -> None:
        """Go on from what `commit` has kept. Raises ResumeError for a commit that another program has made."""
        if not isinstance(committed, dict) or not {"step", "scheduler"} <= committed.keys():
            where = ", ".join(map(str, self.runtime.config.swap_paths))
            raise ResumeError(
                f"{where} holds a commit that `tiermem train` has not made: continue it with the program that has, or "
                "begin anew with --overwrite"
            )
        self.optimizer.load_state_dict(self.runtime.committed_optimizer_state())
        self.scheduler.load_state_dict(committed["scheduler"])
        self.done = self._committed = int(committed["step"])
        self._committed_at = time.perf_counter()
        # With another --steps the schedule has another rate for this step than the one that was committed.
        factor = learning_rate_factor(self.done, self.options.steps)
        for group, peak in zip(self.optimizer.param_groups, self.scheduler.base_lrs, strict=True):
            group["lr"] = peak * factor

    def step(self, number: int) -> StepReport:
        """Do optimizer step `number`: `accumulate` batches forward and backward, one update, which may end later."""
        options = self.options
        stalled = self.runtime.statistics().total.stall_seconds
        started = time.perf_counter()
        numbers = range(number * options.accumulate, (number + 1) * options.accumulate)
        if options.vertical:
            loss_sum = sum(map(float, self.runtime.forward_backward(numbers, self.loss)))
        else:
            loss_sum = 0.0
            for micro_batch in numbers:
                loss = self.loss(micro_batch)
                loss.backward()  # type: ignore[no-untyped-call]
                loss_sum += float(loss.detach())
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.done = number + 1
        if self._is_commit_due():
            self.commit()
        seconds = time.perf_counter() - started
        found = self.runtime.statistics()
        last = found.last or StepStatistics()
        return StepReport(
            loss=self.launch.mean(loss_sum),
            seconds=seconds,
            # Of the same span as `seconds`: the runtime's step ends with the update, before a commit that may wait.
            stall_seconds=found.total.stall_seconds - stalled,
            bytes_read=last.bytes_read,
            bytes_written=last.bytes_written,
            tokens=options.batch * options.seq * options.accumulate,
            number=self.done,
            edges=last.edges,
        )

    def loss(self, number: int) -> torch.Tensor:
        """The share of batch `number` in the mean loss of its step."""
        options = self.options
        rows = batch(self.source, seed=options.seed, number=number, rows=options.batch, length=options.seq)
        tokens = self.launch.part(rows).to(next(self.model.parameters()).device)
        with self.runtime.offload_activations() if options.offload_activations else nullcontext():
            loss: torch.Tensor = self._outputs(tokens).loss / options.accumulate
        return loss

    def _outputs(self, tokens: torch.Tensor) -> Any:
        """What the model makes of a batch. Raises ConfigError if it cannot compute the first one."""
        try:
            found = self.model(input_ids=tokens, labels=tokens, use_cache=False)
        except Exception as error:
            if self.computes or not is_models_own(error):
                raise
            raise ConfigError(
                f"{self.options.model} cannot compute a batch of sequences of {self.options.seq} tokens: "
                f"{reason_of(error)}; give a shorter --seq, or correct the sizes in the model's configuration"
            ) from error
        self.computes = True
        return found

    def _is_commit_due(self) -> bool:
        """Whether to commit after this step; all ranks find the same. At once where one failed, for that to be said."""
        every = self.options.commit_every
        if every == 0 or not self.options.commits:
            return False
        failed = self._committing is not None and self._committing.failed
        if every is not None:
            return self.done % every == 0 or self.launch.mean(float(failed)) > 0
        return self.launch.mean(math.inf if failed else time.perf_counter() - self._committed_at) >= COMMIT_SECONDS

    def commit(self) -> None:
        """Commit what has been done so far, beside what comes next; nothing if that is committed."""
        if self.done == self._committed:
            return
        self._committed, self._committed_at = self.done, time.perf_counter()
        record = {"step": self.done, "scheduler": self.scheduler.state_dict(), "batches": self.batches()}
        self._committing = self.runtime.commit(record)

    def batches(self) -> dict[str, int | str]:
        """What batches follow from, by the names of options; of the text and the tokenizer their sizes."""
        files = {"text": f"{self.source.corpus.nbytes} bytes", "tokenizer": self.source.made_by}
        return {name: getattr(self.options, name) for name in _BATCHES} | files

    def end_commit(self) -> None:
        """Wait for the commit under way, whose writing is to be reported too. Raises its error."""
        if self._committing is not None:
            self._committing.wait()

    def close(self) -> None:
        """End the runtime; its swap files go unless the run commits and has committed something."""
        self.runtime.close(remove=None if self.options.commits else True)


def train_in(
    directories: Sequence[Path], options: TrainOptions, file: Path | None, overrides: Mapping[str, str | bool | None]
) -> TrainReport | None:
    """Train as `train` does, in `directories`, those that `file` names, or, without either, a new one removed after.

    The configuration is that of `file`, if there is one, with what is not None of `overrides` (see `make_config`).
    Under torchrun as one of its ranks, of which the first returns a report.
    """
    asked = named_directories(file, directories)
    if options.resume and not asked:
        raise ConfigError(f"--resume needs the --swap-dir of the run to continue: {file} names no swap_dirs")
    with launched() as launch:
        once = launch.once if launch.size > 1 else None
        with swap_directories(asked, keep=options.commits, once=once, first=launch.local == 0) as chosen:
            settings = make_config(file, chosen, overrides)
            report = train(options, settings, launch.progress(), launch)
    return report if launch.rank == 0 else None


def train(options: TrainOptions, config: tiermem.Config, console: Console, launch: Launch | None = None) -> TrainReport:
    """Train as `options` say under the budgets of `config`, showing progress on `console`; return what happened.

    `launch`: which of several processes this is; each has its own budgets and takes its part of every batch.
    Raises `ConfigError` for options that cannot work, and what `tiermem.offload` raises.
    """
    launch = launch or Launch()
    launch.require_divisible(options.batch)
    require_scalars(options.tensorboard)
    if options.timeline is not None:
        require_writable("--timeline", options.timeline)
    subject = find_subject(options)
    if not options.resume and not config.overwrite:  # the room of what is replaced is known to the runtime only
        late = launch.size > 1 and config.stage == 1  # then gradients are added up, and units updated, after backward
        subject.require_room(config, "forward" if late else config.update, commits=options.commits, launch=launch)
    endurance = parse_endurance(options.endurance, capacity_bytes(config.swap_paths))
    config = dataclasses.replace(config, commits=options.commits)
    baseline = resident_bytes()
    available = available_host_memory() // launch.neighbours
    if available - resolve_host_memory(config, available) < _ROOMY:
        return_large_blocks()
    # The pager's thread may keep the interpreter lock this long while the model's code waits for it.
    sys.setswitchinterval(SWITCH_SECONDS)
    training = Training(options, config, subject, launch=launch)
    steps: list[StepReport] = []
    try:
        say_beginning(training, config, console)
        host_memory = host_budget(config, training.runtime)
        state_bytes = subject.parameters * STATE_BYTES_PER_PARAMETER
        progress = TrainProgress(
            console, steps=options.steps, host_memory=host_memory, baseline=baseline, state_bytes=state_bytes
        )
        run_steps(training, steps, progress)
        if options.commits:
            training.commit()
        training.end_commit()
        overlap, found = training.runtime.timeline(), training.runtime.statistics()
        timeline_error = write_timeline(training.runtime, options.timeline if launch.rank == 0 else None)
    finally:
        training.close()
    return TrainReport(
        model=options.model,
        parameters=subject.parameters,
        state_bytes=state_bytes,
        host_memory=host_memory,
        baseline_rss_bytes=baseline,
        peak_rss_bytes=peak_resident_bytes(),
        steps=tuple(steps),
        wear=wear_of(steps, found.total.bytes_written, endurance),
        tiers=found.tiers,
        overlap=overlap,
        look_ahead=found.look_ahead,
        timeline_error=timeline_error,
    )


def write_timeline(runtime: tiermem.Runtime, file: Path | None) -> str | None:
    """Write it, if it was asked for; return why that failed. What was trained is reported whether it did or not."""
    if file is None:
        return None
    try:
        runtime.timeline(file)
    except OSError as error:
        return f"--timeline: {file} could not be written: {error}"
    return None


def run_steps(training: Training, steps: list[StepReport], progress: TrainProgress) -> None:
    """Do the steps that are left, adding each to `steps` and showing it."""
    directory = training.options.tensorboard if training.launch.rank == 0 else None
    with open_scalars(directory) as scalars, progress:
        for number in range(training.done, training.options.steps):
            steps.append(training.step(number))
            progress.step_done(steps[-1], training.runtime.statistics().tiers)
            if scalars is not None:
                add_step(scalars, steps[-1])


def wear_of(steps: Sequence[StepReport], bytes_written: int, endurance: Endurance) -> Wear:
    """Return what all writing, at the pace of the steps, means for the drives."""
    return measure_wear(
        bytes_written,
        paced_bytes=sum(step.bytes_written for step in steps),
        seconds=sum(step.seconds for step in steps),
        endurance=endurance,
    )


def host_budget(config: tiermem.Config, runtime: tiermem.Runtime) -> int:
    """Return the budget of host memory in bytes: the one asked for, or the one that "auto" came to."""
    if config.host_nbytes is not None:
        return config.host_nbytes
    return next(tier.budget for tier in runtime.statistics().tiers if tier.name == Tier.HOST.name)


def learning_rate_factor(step: int, steps: int) -> float:
    """Return the share of the learning rate at `step`: a linear warm-up, then a cosine down to a tenth."""
    warm_up = max(1, round(steps * WARM_UP_SHARE))
    if step < warm_up:
        return (step + 1) / warm_up
    done = min(1.0, (step - warm_up) / max(1, steps - warm_up))
    return FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * done))


def named_directories(file: Path | None, directories: Sequence[Path]) -> Sequence[Path]:
    """Return the swap directories that the options name, `directories`, or else the configuration `file`; maybe none.

    Raises `ConfigError` for a file that cannot be read, or used where it is the one that names them.
    """
    if directories or file is None or "swap_dirs" not in read_settings(settings_path(file)):
        return directories
    return tiermem.Config.load(file).swap_paths


def make_config(
    file: Path | None, directories: Sequence[Path], overrides: Mapping[str, str | bool | None]
) -> tiermem.Config:
    """Return the configuration in `file`, or else the default, on `directories`, with what is not None of `overrides`.

    Raises `ConfigError` if it cannot be used.
    """
    given: dict[str, Any] = {name: value for name, value in overrides.items() if value is not None}
    if file is None:
        return tiermem.Config(swap_dirs=directories, **given)
    return dataclasses.replace(tiermem.Config.load(file, swap_dirs=directories), **given)
