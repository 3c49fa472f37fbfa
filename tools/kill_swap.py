"""Kills a process that writes generations and commits, again and again, at random instants.

Owns the child that works, the parent that kills it, and the comparison: each resume must find the last acknowledged
commit or the one being made, every byte of it, and in the end the state of an undisturbed run. Knows the swap package
only. Guarantees an exit status of 1, and the directory left for inspection, as soon as anything differs.

    python tools/kill_swap.py DIRECTORY [--kills 500] [--seed 1] [--directories 2]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import swap
from swap.commit import CommitStore
from swap.generations import Generations, Mark
from swap.recovery import find_leftovers, recover
from tools.lives import live, tell

KEYS = tuple(f"tile{index}" for index in range(12))
UNIT = 4096
SPACE = 64 << 20
LARGEST_PAUSE = 0.3  # seconds a child lives
WORKING = 0.7  # of the children are killed while they write and commit


def value_of(key: str, generation: int) -> bytes:
    """The bytes of a key written in a generation: the same in every process."""
    dice = random.Random(f"{key} {generation}")  # noqa: S311 - a pattern, not a secret
    return dice.randbytes(UNIT) * (1 + (KEYS.index(key) * 37) % 90)


def writers_of(generation: int) -> list[str]:
    """The keys that a generation writes: all in the first, some later."""
    return [key for key in KEYS if generation == 0 or random.Random(f"{generation} {key}").random() < 0.6]  # noqa: S311


def state_after(generation: int) -> dict[str, int]:
    """For every key the generation that wrote it last, in an undisturbed run."""
    return {
        key: max(number for number in range(generation + 1) if key in writers_of(number))
        for key in (KEYS if generation >= 0 else ())
    }


class Run:
    """What the child does."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self.mark: Mark | None = None
        self.generation = -1
        self.store = CommitStore(directories, name="r0")
        keep = find_leftovers(directories, name="r0").resumable
        self.space = swap.SwapSpace.open(directories, name="r0", nbytes=SPACE, keep=keep)
        recovered = recover(self.space, self.store) if keep else None
        self.generations = recovered.generations if recovered else Generations(self.space)
        if recovered:
            self.mark, self.generation = recovered.mark, recovered.manifest.generation
            self.check(recovered.manifest.user["written"])

    def check(self, written: dict[str, int]) -> None:
        """Every byte is what the undisturbed run would have."""
        expected = state_after(self.generation)
        if written != expected:
            raise SystemExit(f"generation {self.generation}: expected {expected}, found {written}")
        for key, generation in written.items():
            extent = self.generations.current(key).extent
            with swap.AlignedBuffer(extent.nbytes) as buffer:
                self.space.start_read(extent, buffer.view).wait()
                if buffer.view != value_of(key, generation):
                    raise SystemExit(f"generation {self.generation}: {key!r} has other bytes than were written")

    def step(self) -> None:
        """Write one generation, several keys at a time, and commit it."""
        generation = self.generation + 1
        requests = []
        for key in writers_of(generation):
            value = value_of(key, generation)
            extent = self.generations.extent_for_write(key, len(value))
            buffer = swap.AlignedBuffer(len(value))
            buffer.view[:] = value
            requests.append((key, extent, self.space.start_write(extent, buffer.view, checksum=True)))
        for key, extent, request in requests:
            request.wait()
            self.generations.written(key, extent, request.checksum)
        mark = self.generations.mark()
        self.store.write(generation, mark.entries(), {"written": state_after(generation)}, space=self.space)
        if self.mark is not None:
            self.generations.release(self.mark)
        self.mark, self.generation = mark, generation


def child(directories: Sequence[Path], last: int) -> None:
    """Go on to generation `last`, telling each one that is reached as soon as it is acknowledged."""
    run = Run(directories)
    tell(f"resumed {run.generation}")
    while run.generation < last:
        run.step()
        tell(f"committed {run.generation}")
    run.space.close()
    tell("finished")


def torture(directories: Sequence[Path], *, kills: int, seed: int) -> str:
    """Kill `kills` times, then let it finish and compare. Returns what happened, in words. Raises SystemExit."""
    dice = random.Random(seed)  # noqa: S311 - reproducible instants, not a secret
    acknowledged, resumes, started = -1, 0, time.monotonic()
    for _ in range(kills):
        working = dice.random() < WORKING  # the others die somewhere in starting, opening, verifying, resuming
        life = live(lambda: child(directories, 1 << 60), seconds=dice.uniform(0, LARGEST_PAUSE), working=working)
        for line in life.lines:
            word, _, number = line.partition(" ")
            resumes += word == "resumed"
            if int(number) < acknowledged:
                raise SystemExit(f"generation {acknowledged} was acknowledged, then {line!r}")
            acknowledged = int(number)
    last = acknowledged + 3
    told = live(lambda: child(directories, last), seconds=None, working=False).lines
    if told[-2:] != [f"committed {last}", "finished"]:
        raise SystemExit(f"expected the last child to finish generation {last}, found {told[-2:]}")
    run = Run(directories)  # compares every byte with the undisturbed run
    run.space.close(remove=True)
    run.store.discard()
    seconds = time.monotonic() - started
    return f"{kills} kills, {resumes} resumes seen, {last + 1} generations, nothing lost, {seconds:.0f} s"


def main() -> None:
    """Parse the command line; see the top of this file."""
    parser = argparse.ArgumentParser(description="Kill a committing process at random instants and compare.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directories", type=int, default=2)
    arguments = parser.parse_args()
    directories = [arguments.directory / f"drive{index}" for index in range(arguments.directories)]
    for directory in directories:
        directory.mkdir(parents=True, exist_ok=True)
    print(torture(directories, kills=arguments.kills, seed=arguments.seed))


if __name__ == "__main__":
    main()
