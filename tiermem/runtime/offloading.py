"""`offload`: from a model and a configuration to a running house.

Owns the order of what is looked at before anything is built: the ranks, what the swap directories hold, where values
come from. Does not build (`house.py`). Guarantees that what is refused is refused on all ranks, with nothing changed.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from swap import SwapInUseError
from tiermem.checkpoint.restoring import SnapshotWeights
from tiermem.checkpoint.tensor_file import TensorLoader
from tiermem.checkpoint.weights import open_weights
from tiermem.config import Config, parse_dtype
from tiermem.errors import ConfigError, ResumeError
from tiermem.memory.machine import available_host_memory
from tiermem.memory.sizes import format_bytes
from tiermem.registry import registry
from tiermem.runtime.alike import require_alike
from tiermem.runtime.beginning import Beginning, agree_on_commit, find_beginning
from tiermem.runtime.blueprint import Blueprint, draw
from tiermem.runtime.company import Company, find_company, leave_directories, make_directories, own_directories
from tiermem.runtime.face import Runtime
from tiermem.runtime.house import House, build
from tiermem.runtime.randomness import require_restorable
from tiermem.zero3.collectives import reason_of
from tiermem.zero3.engine import outside_inference, require_names
from tiermem.zero3.guards import guard_placeholders, refuse_placeholders, refuse_unfit
from tiermem.zero3.initialise import Init
from tiermem.zero3.keep import Keep, Keeping
from tiermem.zero3.materialize import WeightSource
from tiermem.zero3.units import Wanted


def offload(
    model: nn.Module,
    config: Config,
    *,
    units: Wanted = None,
    coalesce: int | str = "auto",
    keep: Keep = None,
    keep_dtype: str | torch.dtype | None = None,
    weights: str | os.PathLike[str] | None = None,
    init: Init | None = None,
    resume: bool | str | os.PathLike[str] = False,
    mesh: Any = None,
) -> Runtime:
    """Turn a model's parameters into pages, in place, and have them come and go by themselves.

    Args:
        model: any module on the CPU, on the meta device, or built under `deferred_init`. Names, shapes and dtypes of
            its parameters stay truthful (floating-point ones become `config.param_dtype`, kept ones `keep_dtype`);
            their values are there while a module that reads them runs.
        config: budgets, swap directories and how to update.
        units: what is gathered together: modules, class names, or a predicate on modules. Default: the model's hint
            (Hugging Face's `_no_split_modules`), else children of ModuleLists; what is left becomes units.
        coalesce: bytes up to which small units in a row become one, but for those `units` asks for; 0: none do. "auto":
            1 MiB, or a 128th of the smallest budget; in a resume as in the commit. See zero3/coalesce.py.
        keep: parameters that stay in host memory, within its budget: a function of (name, parameter), a size
            ("100KiB": all not larger), or modules and class names. See zero3/README.md, "Resident by choice".
        keep_dtype: what their floating-point ones become instead of `config.param_dtype`, such as "float32".
        weights: a safetensors file or a Hugging Face folder, streamed straight into pages, converted to the dtypes of
            the model, renamed and merged as transformers does while it loads; buffers and generation_config.json found
            there too. All must fit; with `init` some may be missing. Not read in a resume. See checkpoint/README.md.
        init: called on each module whose own parameters got storage; default: `_init_weights`, else `reset_parameters`.
        resume: False: start anew, and refuse directories that hold a committed run unless `config.overwrite`. "auto":
            continue from the last commit if there is one. True: insist on one. A path: start from that snapshot, in
            directories as for False. After a resume parameters, optimizer state, buffers, step counts and the
            random generators of Python, numpy and torch are those of the commit. See COMMIT.md beside this file.
        mesh: a DeviceMesh of one dimension, or a process group, over whose ranks the model is divided; or one of two
            with names, [copies, parts of each], as in `fully_shard`. Default: all ranks, if torch.distributed is in
            use. All call this, and all below that says "collective", in one order; rank 0's values are what counts.

    Raises:
        ConfigError: the model or the configuration cannot be served.
        BudgetError: a budget is too small; names the largest unit and the least that works.
        CapacityError: the system, or the device, does not have as much memory as a budget says.
        ResumeError: there is nothing to continue, it is of another model, or a commit would be replaced.
        swap.SwapError: a swap directory is missing, read-only, full, in use; files in it, or of weights, are damaged.
    """
    company = find_company(_checked(config), mesh)
    try:
        with outside_inference(), TensorLoader() as loader:  # what the runtime keeps will be written outside of it
            company.together("take the model", lambda: _require_kinds(model, weights, init))
            own = own_directories(config, company)
            beginning = _find_beginning(own, company, resume)
            source = _find_source(own, beginning, model, weights, loader, partial=init is not None)
            blueprint = draw(model, own, units, beginning, company, _keeping(keep, keep_dtype), coalesce)
            require_alike(model, blueprint, own, company, values=_source_in_words(beginning, source))
            _warn_of_missing_memory(model, blueprint, company)
            return _begin(model, partial(build, blueprint, own, beginning, company, init=init, weights=source), config)
    except BaseException as error:
        _give_up(error, config, company)
        raise


def _warn_of_missing_memory(model: nn.Module, blueprint: Blueprint, company: Company) -> None:
    """Say so where more will be taken than there is: an arena's memory comes as it is used, and then nobody can."""
    wanted = min(blueprint.host_nbytes, blueprint.swap_nbytes(1))
    given_up = sum(each.nbytes for each in model.parameters() if each.device.type == "cpu")
    available = available_host_memory() // company.neighbours + given_up
    if wanted > available:
        share = f", the share of one of {company.neighbours} ranks," if company.neighbours > 1 else ""
        warnings.warn(
            f"host_memory lets {format_bytes(wanted)} of this model into host memory, of which "
            f"{format_bytes(available)}{share} are available: the system may end the process when they are used up. "
            "Give less (activations, Python and its libraries come on top), or host_memory='auto'",
            RuntimeWarning,
            stacklevel=3,
        )


def _begin(model: nn.Module, make: Callable[[], House], config: Config) -> Runtime:
    """The runtime of a new house; closed again if nobody gets it, as where an interrupt comes just now."""
    house = None
    try:
        house = make()
        return Runtime(house, config)
    except BaseException:
        guard_placeholders(model.modules())  # what had become of it by then
        if house is not None:
            house.close(remove=None)
        raise


def _give_up(error: BaseException, config: Config, company: Company) -> None:
    """Nothing came of it: tell the other ranks, or that there are some."""
    company.close(f"could not begin: {reason_of(error)}")
    leave_directories(own_directories(config, company), company)
    size = os.environ.get("WORLD_SIZE", "1")  # torchrun's
    joined = torch.distributed.is_available() and torch.distributed.is_initialized()
    if isinstance(error, SwapInUseError) and size != "1" and not joined:
        error.add_note(
            f"this is one of WORLD_SIZE={size} processes, but torch.distributed is not initialised, so that each of "
            "them takes itself for alone: call torch.distributed.init_process_group() before tiermem.offload"
        )


def _checked(config: object) -> Config:
    require_names()
    if not isinstance(config, Config):
        raise ConfigError(f"offload expects a tiermem.Config, found {type(config).__name__}")
    return config


def _keeping(keep: Keep, keep_dtype: str | torch.dtype | None) -> Keeping:
    return Keeping(keep, None if keep_dtype is None else parse_dtype("keep_dtype", keep_dtype))


def _find_beginning(own: Config, company: Company, resume: bool | str | os.PathLike[str]) -> Beginning:
    """What all ranks go on from. Collective."""

    def look() -> Beginning:
        make_directories(own, company)
        return find_beginning(own, resume)

    beginning = company.together("look at its swap directories", look)
    beginning = agree_on_commit(replace(beginning, rank=company.rank), own, company)
    if resume is True and beginning.manifest is None:
        names = ", ".join(str(path) for path in own.swap_paths)
        raise ResumeError(f"resume=True, but {names} holds no commit; use resume='auto' to start anew then")
    past = beginning.past
    states = None if past is None else past["random"]
    # Also where there are none: ranks that are given other sources of values are told so further on (`require_alike`).
    company.together("restore its random number generators", lambda: require_restorable(states))
    return beginning


def _require_kinds(model: object, weights: object, init: object) -> None:
    """Refuse what is not of the kind that `offload` asks for, before anything is opened."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"offload expects a torch.nn.Module, found {type(model).__name__}")
    _refuse_offloaded(model)
    refuse_unfit(model)
    if not (weights is None or isinstance(weights, (str, os.PathLike))):
        raise ConfigError(f"weights: expected the path of a file or a folder, found {type(weights).__name__}")
    if weights == "":  # it would be the folder that the program happens to run in
        raise ConfigError("weights: expected the path of a file or a folder, found an empty one")
    if not (init is None or callable(init)):
        raise ConfigError(f"init: expected a function of a module, found {type(init).__name__}")


def _refuse_offloaded(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if registry.find(parameter) is not None:
            raise ConfigError(f"parameter {name} is offloaded already; close its runtime first")


def _source_in_words(beginning: Beginning, source: WeightSource | None) -> str:
    """What tells one source of values from another: weights are the first rank's, but of a snapshot each reads a part.

    Commits have been compared before.
    """
    if beginning.snapshot is None:
        return f"weights={'given' if source is not None else 'not given'}"
    manifest = beginning.snapshot.manifest
    return f"resume=a snapshot of step {manifest.record['step']} made at {manifest.seconds:.3f}"


def _find_source(
    own: Config,
    beginning: Beginning,
    model: nn.Module,
    weights: str | os.PathLike[str] | None,
    loader: TensorLoader,
    *,
    partial: bool,
) -> WeightSource | None:
    """Where values come from, if not from the model or a commit. `partial`: some may be missing."""
    if beginning.manifest is not None:
        return None
    if beginning.snapshot is not None:
        return SnapshotWeights(beginning.snapshot, model, compare=own.verify != "never")
    if weights is not None:
        return open_weights(weights, model, loader, partial=partial)
    refuse_placeholders(model)
    return None
