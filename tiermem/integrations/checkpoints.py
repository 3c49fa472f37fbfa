"""A Trainer's checkpoint of an offloaded model: which commit of the runtime a folder belongs to, and its weights.

Owns the ticket, a small file in the folder that the commit's `extra` repeats; the export of weights into a folder that
others write into, too; and the way back, weights from such a folder, or from one that transformers' own Trainer wrote,
into pages. Does not know when a Trainer saves.
Guarantees that a folder is taken for resumable only with the very commit it was made with, and that what a folder
holds is durable before the commit that names it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tiermem.checkpoint.restoring import fill_buffer
from tiermem.checkpoint.tensor_file import TensorFile, TensorLoader, open_tensors
from tiermem.errors import ResumeError
from tiermem.integrations.ranks import by_first, is_first
from tiermem.output_file import write_whole
from tiermem.runtime import Runtime

TICKET = "tiermem.json"
OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"  # transformers' names for them
KEY = "transformers.Trainer"  # in the `extra` of a commit
_WHOLE = re.compile(r"\.modules_to_save\.[^.]+$")  # of peft: a copy of a module, for an adapter
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")


@dataclass(frozen=True, slots=True)
class Ticket:
    """One checkpoint: what it is known by, its folder's name, the Trainer's step."""

    id: str
    checkpoint: str
    global_step: int

    @classmethod
    def new(cls, folder: Path, global_step: int) -> Ticket:
        """A ticket that no other checkpoint has. Draws from no random generator that training uses."""
        return cls(uuid.uuid4().hex, folder.name, global_step)

    @classmethod
    def of_folder(cls, folder: Path) -> Ticket | None:
        """The ticket in a folder; None if there is none, or none that is whole (`why_no_ticket`)."""
        try:
            return cls(**json.loads((folder / TICKET).read_text("utf-8")))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    @classmethod
    def of_commit(cls, extra: object) -> Ticket | None:
        """The ticket in what a runtime has committed, or None if no Trainer made that commit."""
        if not isinstance(extra, Mapping) or KEY not in extra:
            return None
        try:
            return cls(**extra[KEY])
        except TypeError as error:
            raise ResumeError(
                f"the commit's extra[{KEY!r}]: expected the ticket of a Trainer's checkpoint, found {extra[KEY]!r}; "
                "it was made by another version of tiermem, or by a program that should use another key"
            ) from error

    @property
    def extra(self) -> dict[str, Any]:
        """What the commit is given."""
        return {KEY: asdict(self)}

    def write(self, folder: Path) -> None:
        """Put it into its folder, in place of another one; whole, or that one stays. Raises OSError."""
        write_whole(folder / TICKET, json.dumps(asdict(self)))


def why_no_ticket(folder: Path) -> str:
    """In words, what keeps a folder from having a ticket."""
    try:
        found = (folder / TICKET).read_bytes()
    except FileNotFoundError:
        return f"there is no {TICKET} in it"
    names = ", ".join(each.name for each in fields(Ticket))
    return f"its {TICKET} is damaged: expected JSON with {names}, found {len(found)} bytes, {found[:80]!r}"


def find_checkpoint(output_dir: Path, ticket: Ticket) -> Path:
    """The folder that belongs to a commit. Raises ResumeError if there is none."""
    for path in output_dir.glob(f"*/{TICKET}"):
        if Ticket.of_folder(path.parent) == ticket:
            return path.parent
    there = output_dir / ticket.checkpoint
    found = "none"
    if there.is_dir():
        other = Ticket.of_folder(there)
        found = f"{there.name!r}, but " + (why_no_ticket(there) if other is None else "of another commit")
    raise ResumeError(
        f"the runtime holds the state of {ticket.checkpoint} (step {ticket.global_step}), expected its folder in "
        f"{str(output_dir)!r}, found {found}; pass the output_dir of that run. To begin anew from its weights, export "
        "them with runtime.save_pretrained and offload with weights="
    )


def set_aside(folder: Path, committed: Ticket | None) -> Path:
    """Move a folder out of the way of one that is to have its name, if it is the one that the last commit belongs to.

    Returns where such a folder is until the next commit is durable; it need not be there.
    """
    aside = folder.with_name(f".{folder.name}.replaced")
    if committed is not None and Ticket.of_folder(folder) == committed:
        shutil.rmtree(aside, ignore_errors=True)
        folder.replace(aside)
    return aside


def make_durable(folder: Path) -> None:
    """Wait until every file in a folder, and its name, are on disk: a commit is about to point there."""
    for path in [*folder.rglob("*"), folder, folder.parent]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def export_weights(runtime: Runtime, folder: Path) -> None:
    """Write the model into a folder that may hold other files, in place of weights that are there.

    As `Runtime.save_pretrained`, by way of a folder inside, so that an error leaves earlier weights as they were.
    Collective: the first rank writes, and the others return when all is there.
    """
    new = folder / f".weights.{uuid.uuid4().hex}"
    refused: OSError | None = None
    if is_first():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            refused = error
    try:
        # First of all, as the runtime notices if not all processes have come to this; without a folder it fails in all.
        runtime.save_pretrained(new)
        by_first("put the model into its folder", lambda: _move_weights(new, folder))
    except Exception:
        if refused is not None:
            raise refused from None
        raise
    finally:
        shutil.rmtree(new, ignore_errors=True)  # of the others it is not there


def _move_weights(new: Path, folder: Path) -> None:
    kept = {path.name for path in new.iterdir()}
    for name in sorted(kept, key=lambda name: name.endswith(".index.json")):  # the index names files that are there
        (new / name).replace(folder / name)
    for path in folder.iterdir():
        if _WEIGHTS.fullmatch(path.name) and path.name not in kept:
            path.unlink()


def export_adapters(runtime: Runtime, folder: Path) -> None:
    """Write what peft reads, by peft itself, of a model of peft that was offloaded with its adapters.

    Of the adapters that are active. Collective. A layer is in memory at a time, with copies, in the first process, of
    what is trained of the others.
    """
    model: Any = runtime.model

    def save() -> None:
        with _answering_from(values, prompts, model):
            model.save_pretrained(str(folder), state_dict=values, selected_adapters=model.active_adapters)

    trained = [(parameter, name) for name, parameter in model.named_parameters() if parameter.requires_grad]
    values = state_buffers(model)
    for layer in _layers(trained):
        with runtime.gathered([parameter for parameter, _ in layer]):
            values |= {name: parameter.detach().clone() for parameter, name in layer if is_first()}
    encoders = {
        name: model.prompt_encoder[name] for name in model.active_adapters if model.peft_config[name].is_prompt_learning
    }
    with torch.no_grad():  # called by all: of several processes none can alone
        prompts = {name: model.get_prompt_embedding_to_save(name) for name in encoders}
    parts = [part for each in encoders.values() for part in (each, each.embedding)]  # whose parameters some kinds read
    with runtime.gathered([parameter for part in parts for parameter in part.parameters(recurse=False)]):
        by_first("save the adapters", save)


@contextmanager
def _answering_from(
    values: Mapping[str, torch.Tensor], prompts: Mapping[str, torch.Tensor], model: nn.Module
) -> Iterator[None]:
    """While peft saves, have copies answer what it asks of modules although it is given a state_dict.

    Of modules that it saves whole it asks their own state_dict, for the names; of the model, the embeddings of prompts.
    """
    whole: list[tuple[str, Any]] = [each for each in model.named_modules() if _WHOLE.search(each[0])]
    try:
        for path, module in whole:
            state = {
                name.removeprefix(f"{path}."): value for name, value in values.items() if name.startswith(f"{path}.")
            }
            module.state_dict = state.copy
        vars(model)["get_prompt_embedding_to_save"] = prompts.__getitem__
        yield
    finally:
        for _, module in whole:
            vars(module).pop("state_dict", None)
        vars(model).pop("get_prompt_embedding_to_save", None)


def state_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """What `model.state_dict()` would hold of buffers, under each of the names that a shared one has."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set  # noqa: SLF001 - torch has no public method for it
    }


def is_of_peft(model: nn.Module) -> bool:
    """Whether the weights of a model have peft's names, which nobody else reads."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def has_moments(folder: Path) -> bool:
    """Whether a folder holds an optimizer's state with moments, as transformers' own Trainer saves it.

    Raises ResumeError if that file cannot be read.
    """
    path = folder / OPTIMIZER
    if not path.is_file():
        return False
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return any("exp_avg" in entry for entry in state["state"].values())
    except Exception as error:  # torch has no one error for a file that is damaged, or no state of an optimizer
        raise ResumeError(f"{str(path)!r}: expected the state of an optimizer, found {error}") from error


def load_optimizer(folder: Path, optimizer: Any, scheduler: Any, *, mapped: bool) -> None:
    """Restore an optimizer and a scheduler from a Trainer's folder, if it has both, by way of host memory.

    transformers reads states straight onto the device, in each of several processes. `mapped`: they stay in the file,
    which is for an optimizer that keeps none of what it is given.
    """
    if (folder / OPTIMIZER).is_file() and (folder / SCHEDULER).is_file():
        optimizer.load_state_dict(torch.load(folder / OPTIMIZER, map_location="cpu", mmap=mapped, weights_only=True))
        scheduler.load_state_dict(torch.load(folder / SCHEDULER, map_location="cpu", weights_only=True))


def load_weights(runtime: Runtime, folder: Path) -> None:
    """Give the offloaded model the values in a Trainer's folder; moments stay as they are.

    A layer is in memory at a time, and a tensor of a file. Raises ResumeError if the folder lacks a parameter, or holds
    one, or a buffer, of another shape, swap.FormatError if a file of it is damaged, before anything is changed.
    """
    opened = map(open_tensors, sorted(folder.glob("*.safetensors")))
    files = {name: file for file in opened for name in file.tensors}
    found = _match(runtime.model, files, folder)
    buffers = [(buffer, name) for name, buffer in runtime.model.named_buffers() if name in files]
    for values, name in (*found, *buffers):
        _require_shape(values, name, files[name])
    with TensorLoader() as loader:
        for layer in _layers(found):
            # What is frozen is written once, and SWAP has no room for it beside what a commit holds: it is the same.
            frozen = [pair for pair in layer if not pair[0].requires_grad]
            with runtime.gathered([parameter for parameter, _ in frozen]):
                same = {name for values, name in frozen if torch.equal(values, loader.load(files[name], name))}
            group = [pair for pair in layer if pair[1] not in same]
            with runtime.gathered([parameter for parameter, _ in group], write=True), torch.no_grad():
                for parameter, name in group:
                    parameter.copy_(loader.load(files[name], name))
        for buffer, name in buffers:
            fill_buffer(runtime.model, name, buffer, loader.load(files[name], name))


def _match(model: nn.Module, files: Container[str], folder: Path) -> list[tuple[nn.Parameter, str]]:
    """Every parameter with the one name, of those it has, under which the files hold it."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    found = []
    never = set(getattr(model, "_keys_to_ignore_on_save", None) or ())  # of transformers: computed, not learned
    for parameter, own in names.items():
        saved = next((name for name in own if name in files), None)
        if saved is None and never.isdisjoint(own):
            raise ResumeError(f"expected the weights of {own[0]} in {str(folder)!r}, found none; choose another folder")
        if saved is not None:
            found.append((parameter, saved))
    return found


def _require_shape(values: torch.Tensor, name: str, file: TensorFile) -> None:
    shape = file.tensors[name].shape
    if shape != tuple(values.shape):
        raise ResumeError(
            f"expected {name} of shape {tuple(values.shape)} in {str(file.path.parent)!r}, found {shape}; these are "
            "the weights of another model"
        )


def _layers(found: list[tuple[nn.Parameter, str]]) -> Iterator[list[tuple[nn.Parameter, str]]]:
    """The same, layer by layer: what has the same name up to its first number; what has none is by itself."""
    layers: dict[str, list[tuple[nn.Parameter, str]]] = {}
    for parameter, name in found:
        numbered = re.match(r"(.*?\.\d+)\.", name)
        layers.setdefault(numbered[1] if numbered else name, []).append((parameter, name))
    yield from layers.values()
