"""Commits: manifests on disk, one replacing the other so that a cut at any instant leaves one that holds.

Owns the manifests of one rank, `<name>.<generation>.manifest` in the first swap directory: with stripes the loss of any
directory is the loss of all, so copies elsewhere would only be something to disagree. Does not move data and does not
lock: the space's lock covers it. Guarantees:

1. A manifest under its final name is whole, and all bytes it speaks of are durable ("The order of a commit").
2. While a manifest exists and no newer one was acknowledged, its extents are untouched, if the caller keeps to rule
   "Keep both marks". So falling back to it, when the newer one turns out to be damaged, is always safe.
3. A file that is not ours, or damaged, is never removed or overwritten.

The order of a commit. (1) fdatasync of every data file: what the manifest promises must be there before the promise.
(2) The manifest under a temporary name, fsync: a name must never become durable before the bytes behind it. (3) rename,
fsync of the directory: the commit; before it the old one holds, after it the new. (4) unlink of the old manifest, fsync
of the directory: only now may the old extents be written over, because only now can nobody fall back to them.
Several stores that must commit together or not at all do (1) and (2), `prepare`, agree, do (3), `publish`, agree, and
do (4), `retire`: as long as one of them may lack the new commit, all of them still have the old one. If one could not
publish, all look whether they have (`is_published`); unless all have, all take it back (`withdraw`). It is nobody's as
soon as one of them has made sure that it lacks it, because what not all have is never gone on from.

Keep both marks. The mark of the last acknowledged commit, and that of the one being written, are kept until `write`
returns; then the older is released. If `write` raises, both are kept until a later `write` returns. After an error that
leaves open which manifest is on disk none does, until `resolve` has found out which one it is.

The end of a doubt. A rename or unlink that failed has happened or not, and a look at the directory tells, once no call
is out that was given up and may still happen. What the look has shown counts when an fsync of the directory succeeds.
If fsync itself has failed, that is no way: the kernel tells of a loss only once. Then the store is failed for good.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from swap import manifest as format_of
from swap.errors import FormatError, SwapError, SwapIOError
from swap.manifest import Entry, Manifest
from swap.manifest_files import ManifestFiles
from swap.patience import PatientSystemCalls
from swap.settings import STALL_SECONDS
from swap.space import SwapSpace
from swap.syscalls import SystemCalls


class CommitStore:
    """The manifests of rank `name`. Not thread-safe: one thread commits."""

    def __init__(
        self,
        directories: Sequence[Path],
        *,
        name: str,
        system: SystemCalls | None = None,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        """Open the store in existing directories, the same as the space's and in the same order.

        After `stall_seconds` without an answer of the drive a system call is an error.
        """
        self.directory = os.fspath(directories[0])
        self._system = PatientSystemCalls(system, stall_seconds)
        self._files = ManifestFiles(self.directory, name, self._system)
        self._latest: Manifest | None = None
        self._settled = False
        self._failed: BaseException | None = None
        self._for_good = False  # failed so that no look at the directory can tell which manifest holds
        self._prepared: Manifest | None = None
        self._published = False  # what was prepared; durably
        self._leftover: int | None = None  # a generation given up, whose manifest may be there all the same

    @property
    def in_doubt(self) -> bool:
        """Whether a commit failed so that it is not known which manifest is on disk: both marks must be kept then."""
        return self._failed is not None

    def read_latest(self) -> Manifest | None:
        """The newest intact manifest; None if there is none at all. Changes nothing.

        Raises FormatError if the newest one is damaged and there is no earlier one whose extents are untouched, or if
        something that is not ours has its name.
        """
        while True:
            found = self._files.found()
            try:
                return _newest(self._files, found)
            except SwapIOError as error:
                # Gone since it was found: a run that lives has committed meanwhile.
                if error.errno != errno.ENOENT or self._files.found() == found:
                    raise

    def read(self, generation: int) -> Manifest | None:
        """The manifest of this generation; None if there is none. Raises FormatError if it is damaged."""
        return self._files.read(generation) if generation in self._files.found() else None

    def settle(self, manifest: Manifest, *, space: SwapSpace) -> None:
        """Go on from this manifest, which `read_latest` or `read` returned: remove all others, put damaged ones aside.

        Newer ones are damaged, or commits that not all stores had which were to commit together. Waits until that is
        durable. From then on the extents of the others may be overwritten.
        """
        space.company.add(self._system)
        for generation in self._files.found():
            if generation > manifest.generation and not self._files.is_whole(generation):
                self._files.put_aside(generation)
            elif generation != manifest.generation:
                self._files.remove(generation)
        self._files.sync()
        self._latest = manifest
        self._settled = True

    def discard(self) -> None:
        """Forget all commits, as `SwapSpace.open` forgets those of an earlier run. Waits until that is durable.

        To be called by whoever holds the space's lock. Raises what `ManifestFiles.discard` raises.
        """
        self._files.discard()
        self._latest = None
        self._settled = True

    def write(
        self, generation: int, entries: Iterable[Entry], user: Mapping[str, Any], *, space: SwapSpace
    ) -> Manifest:
        """Commit: returns when the manifest, and everything it speaks of, is durable. Waits for the drive.

        `entries` must come from a mark that is live until then, whose writes have ended ("Keep both marks"); `user` is
        what JSON holds, with text for keys. `generation` must exceed that of the last commit. Writes to other extents
        may go on meanwhile. Raises SwapIOError, SwapFullError, SwapError where no commit is possible; TypeError or
        ValueError for an unfit `user`, ValueError for a `generation` that is not above the last.
        """
        self.prepare(generation, entries, user, space=space)
        self.publish()
        return self.retire()

    def prepare(self, generation: int, entries: Iterable[Entry], user: Mapping[str, Any], *, space: SwapSpace) -> None:
        """The first part of `write`, with its parameters and errors: all is durable, and nothing committed yet."""
        self._require_possible(generation)
        space.company.add(self._system)
        manifest = Manifest(generation, space.run_id, space.file_sizes, tuple(entries), user, time.time())
        packed = format_of.pack(manifest)
        space.make_durable()
        self._files.write_new(packed, generation)
        self._prepared, self._published = manifest, False

    def withdraw(self) -> bool:
        """Give up what was prepared, published or not; return whether it is durably not there. Waits for the drive.

        False: this store's manifest of it may be there, or may yet appear. It is removed before the next commit, which
        is refused as long as that cannot be done.
        """
        manifest = self._require_prepared()
        try:
            there = self._look()
            if there:
                with self._in_doubt():
                    self._files.remove(manifest.generation)
                with self._in_doubt(for_good=True):
                    self._files.sync()
        except SwapError:
            self._prepared, self._leftover = None, manifest.generation
            return False
        with contextlib.suppress(SwapError):  # it does not count, and whoever writes the next one replaces it
            self._files.drop_new()
        self._failed = self._prepared = None
        return True

    def publish(self) -> None:
        """The second part of `write`: what was prepared is committed, and the commit before still there."""
        manifest = self._require_prepared()
        with self._in_doubt():
            self._files.publish_new(manifest.generation)
        with self._in_doubt(for_good=True):
            self._files.sync()
        self._published = True

    def is_published(self) -> bool:
        """Whether it is known that what was prepared is durably committed; `publish` may have raised. Waits."""
        try:
            there = self._look()
        except SwapError:
            return False
        if there:
            self._published, self._failed = True, None
        return there

    def retire(self) -> Manifest:
        """The last part of `write`: remove the commit before, whose extents may be written over from now on.

        Raises ValueError, and removes nothing, unless what was prepared is known to be published.
        """
        manifest = self._require_prepared()
        if not self._published:
            raise ValueError(f"expected generation {manifest.generation} to be published, found it prepared only")
        if self._latest is not None:
            with self._in_doubt():
                self._files.remove(self._latest.generation)
            with self._in_doubt(for_good=True):
                self._files.sync()
        self._latest, self._prepared = manifest, None
        return manifest

    def resolve(self) -> Manifest | None:
        """After `publish` or `retire` raised: find out which commit holds, and end the doubt. Waits for the drive.

        Returns the new one, durable, with the one before removed; or None: the one before holds, the new one was given
        up. Its mark may be released then, or that of the one before. Raises SwapError where it cannot be found out, or
        not yet; everything is as it was then.
        """
        if self._failed is None:
            raise ValueError("there is no doubt which commit holds")
        manifest = self._require_prepared()
        if not self._look():
            self.withdraw()
            return None
        self._published = True
        self.retire()
        self._failed = None
        return manifest

    def fail(self, error: BaseException) -> None:
        """Say that it is not known which commit holds: another store may or may not have published its part."""
        self._failed = self._failed or error
        self._for_good = True

    def _look(self) -> bool:
        """Whether what was prepared is published, durably. Raises SwapError if that cannot be found out, or not yet."""
        if self._failed is None:
            return self._published
        late = len(self._system.late())
        if self._for_good or late:
            reason = f"; {late} calls are not answered yet" if late else ""
            raise SwapError(f"it is not known which commit holds after this: {self._failed}{reason}") from self._failed
        with self._in_doubt(for_good=True):
            self._files.sync()  # what is seen from here on is durable
        return self._require_prepared().generation in self._files.found()

    def _require_prepared(self) -> Manifest:
        if self._prepared is None:
            raise ValueError("nothing was prepared to be committed")
        return self._prepared

    @contextlib.contextmanager
    def _in_doubt(self, *, for_good: bool = False) -> Iterator[None]:
        """After an error in here it is not known which manifest is on disk; `for_good`: and cannot be found out."""
        try:
            yield
        except BaseException as error:
            self._failed = self._failed or error
            asked = not isinstance(error, OSError) or error.errno != errno.EAGAIN  # else: no thread to ask by
            self._for_good = self._for_good or (for_good and asked)
            raise

    def _require_possible(self, generation: int) -> None:
        """Raise SwapError or ValueError unless `generation` can be committed now; removes what `withdraw` left."""
        if late := len(self._system.late()):
            raise SwapError(f"no commit is possible yet: {late} calls on {self.directory!r} are not answered")
        if self._leftover is not None and not self._for_good:
            with self._in_doubt(for_good=True):
                self._files.sync()
            if self._leftover in self._files.found():
                self._files.remove(self._leftover)
                with self._in_doubt(for_good=True):
                    self._files.sync()
            self._leftover = self._failed = None
        if self._failed is not None:
            raise SwapError(f"no commit is possible after this: {self._failed}") from self._failed
        if not self._settled:
            if self._files.found():
                raise SwapError(
                    f"{self.directory!r} holds commits of an earlier run: settle on the latest, or discard them, first"
                )
            self._settled = True
        if generation < 0 or (self._latest is not None and generation <= self._latest.generation):
            last = self._latest.generation if self._latest is not None else "none"
            raise ValueError(f"expected a generation above the last ({last}), found {generation}")


def _newest(files: ManifestFiles, found: Sequence[int]) -> Manifest | None:
    """The newest intact one of the generations `found`."""
    damage: FormatError | None = None
    for generation in sorted(found, reverse=True):
        try:
            return files.read(generation)
        except FormatError as error:
            if not files.is_ours(generation):
                raise
            damage = damage or error
    if damage is not None:
        raise FormatError(f"{damage}; there is no earlier commit to fall back to: {len(found)} manifests, none whole")
    return None
