"""Contenders that are alive together and do steps in turn, so that a machine's changing speed meets all of them alike.

Owns the processes and whose turn it is. Does not know what a step is: a contender does one for each line on its stdin
(`--in-turns`, in `workloads.py`). Guarantees that only one of them is asked to work at a time, that each turn begins
with a step that is not counted (the one before it was followed by a pause in which a drive could catch up), and that
the order is reversed from round to round.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import Any, Self


class PlayerError(Exception):
    """A contender has died; `errors` is what it wrote to stderr."""

    def __init__(self, name: str, code: int, errors: str) -> None:
        last = (errors.strip().splitlines() or ["no output"])[-1]
        super().__init__(f"exit code {code}: {last}")
        self.name = name
        self.errors = errors


class Player:
    """A contender in a process of its own."""

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str]) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in __exit__
        self._process = subprocess.Popen(
            [*command, "--in-turns"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def step(self) -> float:
        """Let it do a step; return the seconds it took. Raises PlayerError if it has died."""
        started = time.perf_counter()
        self._ask()
        self._answer()
        return time.perf_counter() - started

    def finish(self) -> dict[str, Any]:
        """Let it end; return its outcome (`workloads.Outcome`). Raises PlayerError if it fails."""
        output, _ = self._process.communicate()
        if self._process.returncode != 0 or not output.strip():
            raise self._died()
        outcome: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
        return outcome

    def _ask(self) -> None:
        stream = self._process.stdin
        try:
            if stream is not None:
                stream.write("step\n")
                stream.flush()
        except BrokenPipeError:
            raise self._died() from None

    def _answer(self) -> None:
        stream = self._process.stdout
        if stream is None or not stream.readline():
            raise self._died()

    def _died(self) -> PlayerError:
        code = self._process.wait()
        self._errors.seek(0)
        return PlayerError(self.name, code, self._errors.read())


def take_turns(
    players: Sequence[Player], *, warm_up: int, rounds: int, steps: int, pause: float = 0.0
) -> list[list[list[float]]]:
    """Return, for each player, for each round, the seconds of `steps` steps.

    `pause`: seconds of rest before each turn, where a drive is still at what the contender before has written.
    """
    for player in players:
        for _ in range(warm_up):
            player.step()
    blocks: list[list[list[float]]] = [[] for _ in players]
    for number in range(rounds):
        turns = list(zip(players, blocks, strict=True))
        for player, own in turns if number % 2 == 0 else reversed(turns):
            time.sleep(pause)
            player.step()
            own.append([player.step() for _ in range(steps)])
    return blocks
