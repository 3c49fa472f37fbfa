"""The optimizer that users see.

Owns hyperparameters, param groups and step counts. Does not know pages, tiles or threads: it finds the runtime of its
parameters in the registry and asks it to update them. Guarantees to be a `torch.optim.Optimizer` for everybody who
looks (schedulers, trainers, checkpoints of the loop), and to hold no tensor of a parameter's size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from tiermem.errors import ConfigError, CopyError, TiermemError
from tiermem.interrupts import call_out, refuse_amid
from tiermem.optim.byhand import Membership, NoState, moments_elsewhere
from tiermem.optim.hyperparameters import (
    UNSUPPORTED,
    GroupReader,
    Numbers,
    as_number,
    norm_to_clip_by,
    refuse_torch_options,
    require_settings,
)
from tiermem.optim.saved import moments_of, step_counts_in
from tiermem.optim.scaling import record_finite, refuse_hidden_scale, unscaling_factor
from tiermem.optim.service import Moments, StepResult, UpdateService
from tiermem.optim.updates import Settings
from tiermem.registry import registry

# Steps skipped in a row before it is said that nothing is learned: one or two may be a bad batch.
_HOPELESS = 5


class AdamW(torch.optim.Optimizer):
    """AdamW for the parameters of a model given to `tiermem.offload`.

    Same numbers as `torch.optim.AdamW(fused=True)`. Gradients are used up by `step()`: they do not add to the next
    step's even without `zero_grad()`. With `max_grad_norm` every step first clips by the global norm.

    Moments are pages of the model, not of the optimizer: one made for parameters that have another already takes them
    over with their step counts, and the other one can step no more. Change settings in `param_groups` instead.

    Attributes:
        max_grad_norm: may be changed between steps; None does not clip, 0 is an error of the next step.
        skipped: how many steps were skipped because a gradient was not finite.

    Raises:
        ConfigError: a hyperparameter is of another kind or out of range, or the parameters do not belong to one
            offloaded model. It is a ValueError, as torch's; for an unknown argument a TypeError too.
        TiermemError: the runtime is closed, or the system allows no thread for updates: then it may be tried again.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_grad_norm: float | None = None,
        **unsupported: object,
    ) -> None:
        refuse_torch_options(unsupported)
        norm_to_clip_by(max_grad_norm)
        self.max_grad_norm = max_grad_norm
        self.skipped = 0
        self._in_a_row = 0  # of the latest steps, how many were skipped
        self._service: UpdateService | None = None
        self._index_of: dict[torch.Tensor, int] = {}
        self._members = Membership()
        self._steps: dict[int, int] = {}
        self._groups = GroupReader()
        self._last = StepResult(None, skipped=False)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        require_settings(defaults)
        super().__init__(params, defaults)
        self.state = NoState()

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """Global gradient norm, before clipping, of the last step or `clip_grad_norm_` call that had it taken: 0-dim.

        None before the first.
        """
        return self._last.grad_norm

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's. Raises ConfigError as the constructor; all parameters are of one runtime."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            refuse_torch_options({key: group[key] for key in UNSUPPORTED if key in group})
            require_settings(group)
            service, indices = self._resolve(group["params"])
        except BaseException:
            self.param_groups.pop()
            raise
        if service is None:  # a group without parameters came first, as scripts that sort them by name may have it
            return
        self._service = service
        self._index_of.update(zip(group["params"], indices, strict=True))
        self._members.add(group, indices)
        self._steps.update(service.attach_optimizer(self, indices))

    # torch.amp.GradScaler looks for these: it then leaves unscaling and skipping to `step`.
    _step_supports_amp_scaling = True

    def step(self, closure: Callable[[], Any] | None = None, *, grad_scaler: torch.amp.GradScaler | None = None) -> Any:
        """Update the parameters that have gradients; return what `closure`, if given, returned.

        Depending on `Config.update` the updates are done, or only queued, when this returns; an error of one is raised
        here, by the next use of its unit or by the next step. A gradient norm that is not finite skips the step; with
        update="backward" and no clipping it may be too late for that, which raises TiermemError and ends the step.
        `grad_scaler` is given by `torch.amp.GradScaler.step`: gradients are unscaled first, before any clipping.

        Raises:
            ConfigError: a parameter has a `.grad`, or another optimizer since; a setting is not a finite number; loss
                scaling with update="backward"; gradients have grown since `clip_grad_norm_`.
            TiermemError: as above, somebody keeps a view of a parameter, or the runtime is closed.
            Exception: the error of an update that failed.
        """
        refuse_amid()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = call_out(closure)
        self._refuse_plain_gradients()
        if not isinstance(self.state, NoState):
            raise moments_elsewhere()
        self._members.follow(self.param_groups, self._index_of, closely=True)
        for group in self.param_groups:  # all of them, before the first update is queued
            self._groups.read(group)
        if grad_scaler is None:
            refuse_hidden_scale(self)
            result = self._runtime().step(self)
        else:
            result = self._runtime().step(self, unscale=unscaling_factor(grad_scaler, self))
            record_finite(grad_scaler, self, finite=not (result.skipped or result.partial))
        self._last = StepResult(result.grad_norm if result.grad_norm is not None else self.grad_norm, result.skipped)
        if result.outdated:
            warnings.warn(
                "settings (lr, betas, eps, weight_decay) were changed between backward and step, when "
                "update='backward' had used the old ones already. From now on such updates can be undone, which costs "
                "as much as doing them: change settings before backward, or choose update='auto'",
                RuntimeWarning,
                stacklevel=3,
            )
        if result.partial:
            raise TiermemError(
                "the gradient norm of this step is not finite, but update='backward' had updated other units already, "
                "and they stay updated. The remaining gradients are dropped; training can go on, or resume from a "
                "commit. To have such steps skipped as a whole pass max_grad_norm to the optimizer, or choose "
                "update='auto', 'forward' or 'step'"
            )
        self._in_a_row = self._in_a_row + 1 if result.skipped else 0
        if result.skipped:
            self.skipped += 1
            if grad_scaler is None:
                self._warn_of_skipped()
        return loss

    def _warn_of_skipped(self) -> None:
        if self.skipped == 1:
            warnings.warn(
                "a step was skipped because its gradient norm is not finite; optimizer.skipped counts such steps",
                stacklevel=4,
            )
        if self._in_a_row == _HOPELESS:
            warnings.warn(
                f"{_HOPELESS} steps in a row were skipped because their gradient norms are not finite: nothing is "
                "learned. If the same model trains in plain PyTorch, parameters are used where they are paged out: "
                "outside any call of the model, or by module.forward(x) instead of module(x); put "
                "forward and backward inside `with runtime.gathered(module):`",
                stacklevel=4,
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that no step has used. Raises TiermemError if the runtime is closed.

        Where update="backward" has used some already that counts, which a RuntimeWarning says.
        """
        refuse_amid()  # first: one may just have come that nobody has taken yet
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as in `_refuse_plain_gradients`
            super().zero_grad(set_to_none)
        self._runtime().drop_gradients(self)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip this optimizer's gradients by their global norm, as `torch.nn.utils.clip_grad_norm_`; return it, 0-dim.

        Call it after the last backward of a step: where another one adds to what was clipped, the next call and
        `step()` raise `ConfigError`.

        Raises `ConfigError` also for a `max_norm` that is negative or no number, and when update="backward" has used
        gradients up that the norm needs: it keeps them once it has seen a call of this, so call it in every step, or
        set `max_grad_norm`.
        """
        refuse_amid()
        norm = self._runtime().clip_gradients(self, as_number("max_norm", max_norm))
        self._last = StepResult(norm, self._last.skipped)
        return norm

    def settings(self, parameters: Iterable[int]) -> Mapping[int, Settings]:
        """For the runtime: settings of these parameters for their next update; counts nothing.

        Raises ConfigError for what has been written into `param_groups` that is not a number or no parameter of ours.
        """
        settings: dict[int, Settings] = {}
        read: dict[int, Numbers] = {}
        self._members.follow(self.param_groups, self._index_of, closely=False)
        for index in parameters:
            group = self._members.group_of(index)
            found = read.get(id(group))
            if found is None:
                found = read[id(group)] = self._groups.read(group)
            settings[index] = Settings(*found, step=self._steps.get(index, 0) + 1)
        return settings

    def count(self, settings: Mapping[int, Settings]) -> None:
        """For the runtime: these parameters have been updated, or will be, with these settings; said twice, once."""
        for index, used in settings.items():
            self._steps[index] = used.step

    def steps_of(self, parameter: torch.Tensor) -> int:
        """How many updates a parameter has had (or has queued). Raises KeyError for one that it does not have."""
        return self._steps.get(self._index_of[parameter], 0)

    def step_counts(self) -> Mapping[int, int]:
        """For the runtime: how many updates each parameter has had (or has queued), by its number."""
        return dict(self._steps)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with only the step count as state of a parameter; masters and moments are pages, see `commit`."""
        packed = super().state_dict()
        packed["state"] = {
            number: {"step": self._steps[self._index_of[parameter]]}
            for number, parameter in enumerate(self._parameters())
            if self._index_of[parameter] in self._steps
        }
        return packed

    def full_state_dict(self) -> dict[str, Any]:
        """The same with moments, as `torch.optim.AdamW.load_state_dict` takes it: a run goes on in plain PyTorch.

        float32, each of its parameter's shape, in ordinary memory: 8 bytes a parameter. Give the model the values of
        `runtime.master(parameter)`, or `Runtime.close(restore_model=True)` if they are float32. Collective: every rank
        gets all of it. Raises TiermemError between backward and step, once there are moments.
        """
        refuse_amid()
        packed = self.state_dict()
        for group in packed["param_groups"]:
            group["fused"] = True  # whose bits these are
        parameters, runtime = list(self._parameters()), self._runtime()
        indices = [self._index_of[parameters[number]] for number in packed["state"]]
        for entry, moments in zip(packed["state"].values(), runtime.read_moments(indices), strict=True):
            entry["step"] = torch.tensor(float(entry["step"]), dtype=torch.float32, device="cpu")
            entry["exp_avg"], entry["exp_avg_sq"] = moments
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore groups and step counts; and moments where there are some, as `torch.optim.AdamW` saves them.

        With a state of torch's AdamW a run that was begun in plain PyTorch goes on; give the model its weights before
        it is offloaded. Moments of any floating dtype are taken one after the other, so they may be of a file that is
        mapped (`torch.load(path, mmap=True)`); on several ranks each loads the same. A parameter without a state in it
        keeps its count, as its moments are pages and stay. Where that makes a difference it warns.

        Raises `ConfigError` for a state or groups of another optimizer or another model, or without numbers, and
        `TiermemError` between backward and step; nothing is changed then.
        """
        refuse_amid()
        counts = step_counts_in(state_dict, [len(group["params"]) for group in self.param_groups])
        store = self._prepare_moments(state_dict)
        entries = state_dict["state"]
        steps = {number: {"step": count, "alone": len(entries[number]) == 1} for number, count in counts.items()}
        super().load_state_dict({**state_dict, "state": steps})
        loaded, self.state = self.state, NoState()
        store()
        # The counts of the others stay: moments beside a count of 0 would be scaled up as if they were of one step.
        found = {self._index_of[parameter]: entry["step"] for parameter, entry in loaded.items()}
        whole = {self._index_of[parameter] for parameter, entry in loaded.items() if not entry["alone"]}
        rest = [number for number in self._index_of.values() if number not in whole]
        others = sum(found.get(number, 0) != self._steps.get(number, 0) for number in rest)
        self._steps.update(found)
        if others:
            warnings.warn(
                f"this state has no moments of {others} parameters that have had another number of updates here than "
                "it says (none, if it leaves them out): their moments stay, so what follows will not be what the run "
                "that saved it did. Save optimizer.full_state_dict() after a step, or resume from a commit or a "
                "snapshot; to begin anew, offload the model again",
                RuntimeWarning,
                stacklevel=2,
            )

    def _prepare_moments(self, state_dict: Mapping[str, Any]) -> Callable[[], None]:
        """Check the moments in a state, and return what stores them. Torch sees to the numbers of parameters."""
        given: dict[int, Moments] = {}
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=False):
            for number, parameter in zip(saved["params"], group["params"], strict=False):
                moments = moments_of(state_dict["state"].get(number, {}))
                if moments is not None:
                    given[self._index_of[parameter]] = moments
        return self._runtime().prepare_moments(given) if given else lambda: None

    def __getstate__(self) -> dict[str, Any]:
        """Raise CopyError: what copies and pickles the optimizer would get one that knows no runtime."""
        raise CopyError(
            "the optimizer of an offloaded model was copied or pickled; its parameters and moments are pages of the "
            "runtime, which cannot be. Keep optimizer.state_dict(), or have everything kept by runtime.commit()"
        )

    def _refuse_plain_gradients(self) -> None:
        # Absent parameters have nothing to say to this, and asking them costs more than all the rest.
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch has no public name for it
            found = next((parameter for parameter in self._parameters() if parameter.grad is not None), None)
        if found is not None:
            raise ConfigError(
                f"a parameter of shape {tuple(found.shape)} has a .grad, which would be ignored: gradients of "
                "an offloaded model are pages. Either it was frozen when it was offloaded (set requires_grad "
                "before tiermem.offload), or .grad was assigned (change gradients with parameter.register_hook), or "
                "was there before tiermem.offload and got nothing since (call zero_grad() first)"
            )

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _runtime(self) -> UpdateService:
        if self._service is None:
            raise ConfigError("this optimizer has no parameters")
        return self._service

    def _resolve(self, parameters: Iterable[torch.Tensor]) -> tuple[UpdateService | None, list[int]]:
        service, indices = self._service, []
        for parameter in parameters:
            found = registry.find(parameter)
            if found is None or not isinstance(found.owner, UpdateService):
                raise ConfigError(
                    f"a parameter of shape {tuple(parameter.shape)} does not belong to an offloaded model; call "
                    "tiermem.offload(model, config) first, or use torch.optim.AdamW"
                )
            if service is not None and found.owner is not service:
                raise ConfigError("the parameters belong to two runtimes; make one optimizer for each")
            service = found.owner
            indices.append(found.index)
        return service, indices
