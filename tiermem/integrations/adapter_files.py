"""Adapters that are ordinary tensors around an offloaded model, in the files of peft: out, and in again.

Owns which tensors those are, and which of them a file of peft holds under which name: as peft itself says, whose kinds
of adapters name their parts each in its own way. Does not know Trainers, and reads nothing that is paged. Guarantees
that a folder is read only if it holds all that is trained, and nothing else, and that nothing is changed before.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tiermem.checkpoint.tensor_file import TensorLoader, open_tensors
from tiermem.errors import ResumeError
from tiermem.integrations.checkpoints import is_of_peft, state_buffers
from tiermem.registry import registry

try:
    from peft import get_peft_model_state_dict
except ImportError as error:
    raise ImportError("tiermem.integrations.adapter_files needs peft: pip install peft") from error

_FILE = "adapter_model.safetensors"


def trained_adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What is trained, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def adapter_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """What `model.state_dict()` would hold of adapters, those too that are not active: all that is not paged."""
    found: dict[str, torch.Tensor] = {
        name: parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if registry.find(parameter) is None
    }
    return found | state_buffers(model)


def load_adapters(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Give all adapters the values in a folder that a Trainer has saved them in.

    Raises ResumeError if the folder does not hold exactly what would be saved there now, or if that is not what is
    trained; swap.FormatError if a file is damaged. Before anything is changed.
    """
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    # transformers saves a table whole beside its adapter: what is frozen, and stays as it is.
    frozen = {(n, tuple(p.shape)) for n, p in model.named_parameters(remove_duplicate=False) if registry.find(p)}
    for own, path in _files(model, Path(folder)):
        if not path.is_file():
            raise ResumeError(
                f"expected {_FILE} in {str(path.parent)!r}, found none; pass a checkpoint of this Trainer"
            )
        file = open_tensors(path)
        with TensorLoader() as loader:
            saved = {name: loader.load(file, name) for name in file.tensors}
        shapes = {(name, tuple(values.shape)) for name, values in saved.items()} - frozen
        wanted = {(name, tuple(values.shape)) for name, values in own.items()}
        if shapes != wanted:
            odd = min(shapes ^ wanted)
            raise ResumeError(
                f"{str(path.parent)!r} holds other adapters than this model: {odd[0]} of shape {odd[1]} is in one of "
                "them only; make the model with the adapters of that run"
            )
        pairs += [(own[name], saved[name]) for name in own]
    lost = not_saved(model)
    if lost is not None:
        raise ResumeError(f"{os.fspath(folder)!r}: {lost}; no run of these adapters can go on from a folder")
    with torch.no_grad():
        for tensor, values in pairs:
            tensor.copy_(values)


def not_saved(model: nn.Module) -> str | None:
    """In words, the first of what is trained that peft does not save, or None; of some prompts it saves results."""
    saved = {id(tensor) for own, _ in _files(model, Path()) for tensor in own.values()}
    lost = (name for name, parameter in trained_adapters(model).items() if id(parameter) not in saved)
    name = next(lost, None)
    return name and f"peft saves nothing of {name}, which is trained, or only what is computed from it"


def _files(model: Any, folder: Path) -> Iterator[tuple[dict[str, torch.Tensor], Path]]:
    """What peft saves of each adapter, by its name in the file, and the file."""
    state = adapter_state(model)
    if not is_of_peft(model):  # adapters that transformers itself has put on, which gives them the names of peft
        own = get_peft_model_state_dict(model, state_dict=state, adapter_name=model.active_adapters()[0])
        yield {f"base_model.model.{name}": values for name, values in own.items()}, folder / _FILE
        return
    for adapter, config in model.peft_config.items():
        own = get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter)
        if config.is_prompt_learning:  # of which peft saves what is computed: where that is a table's rows, the table
            table = model.prompt_encoder[adapter].embedding.weight
            if torch.equal(own["prompt_embeddings"], table.cpu()):
                own["prompt_embeddings"] = table
        yield own, (folder if adapter == "default" else folder / adapter) / _FILE
