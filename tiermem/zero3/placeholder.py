"""What stands in for a parameter while its unit is sharded.

Owns one scalar per dtype and device, expanded to any shape. Does not know units. Guarantees true shape, dtype and
device at no memory, that reading a floating-point placeholder gives NaN, and that a write into one is noticed.

A write into an expanded tensor mostly raises in torch itself, but `fill_`, `zero_` and writes into tensors of one
element go through and change the shared scalar. `check` finds them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tiermem.errors import TiermemError


class Placeholders:
    """The shared scalars behind all placeholders of a model."""

    def __init__(self) -> None:
        self._scalars: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._expanded: dict[tuple[tuple[int, ...], torch.dtype, torch.device], torch.Tensor] = {}
        self._addresses: set[int] = set()
        self._watches: list[Callable[[], bool]] = []  # whether each scalar is still what it was

    def of(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor of this shape, dtype and device that has no storage of its own."""
        found = self._expanded.get((shape, dtype, device))
        if found is None:
            scalar = self._scalars.get((dtype, device))
            if scalar is None:
                scalar = self._scalars[dtype, device] = _marker(dtype, device)
                self._addresses.add(scalar.data_ptr())
                self._watches.append(_watch(scalar))
            found = self._expanded[shape, dtype, device] = scalar.expand(shape)
        return found

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is one of these placeholders, shows what they show (`model.half().float()`), or nothing."""
        if tensor.data_ptr() in self._addresses or tensor.numel() == 0:
            return True
        if not marker_value(tensor.dtype):
            return False  # False, or 0 of what has no sign: somebody's values, and nothing converts it
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - absent.py is not to see this
            values = tensor.detach()
            marker = _marker(values.dtype, values.device)
            return bool(((values == marker) | ((values != values) & (marker != marker))).all())

    def check(self, names: str) -> None:
        """Raise TiermemError if somebody wrote into a placeholder; `names` says where it was noticed.

        The scalars are mended first, so that one such write is reported once.
        """
        if all(unwritten() for unwritten in self._watches):
            return
        written = [key for key, scalar in self._scalars.items() if not _is_marker(scalar)]
        for dtype, device in written:
            self._scalars[dtype, device].copy_(_marker(dtype, device))
        if written:
            dtypes = ", ".join(str(dtype) for dtype, _ in written)
            raise TiermemError(
                f"a parameter ({dtypes}) was written while its values were paged out; noticed while gathering {names}. "
                "The write is lost. Use `with runtime.gathered(module_or_parameters, write=True):` around it"
            )


def is_placeholder(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a placeholder, of this model or another: one marker, expanded (strides of zero).

    One without dimensions cannot be told from a value, and is not taken for one.
    """
    if tensor.is_meta or tensor.numel() == 0 or tensor.dim() == 0 or any(tensor.stride()):
        return False
    # No operation on the parameter itself: inside a call that would bring its values (borrow.py), with several ranks
    # from the others, who are elsewhere.
    value = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return _is_marker(value.set_(tensor.untyped_storage(), tensor.storage_offset(), (), ()))


def marker_value(dtype: torch.dtype) -> float | int | bool:
    """What stands for no value: NaN where there is one; the smallest of integers, False, as they have none."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def _marker(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((), marker_value(dtype), dtype=dtype, device=device)


def _watch(scalar: torch.Tensor) -> Callable[[], bool]:
    """Whether a scalar is a marker, asked of its bytes: an operation of torch's costs more, and lets others run."""
    if scalar.device.type != "cpu":
        return lambda: True
    kept = bytes(scalar.reshape(1).view(torch.uint8).numpy())
    now = scalar.reshape(1).view(torch.uint8).numpy().data
    return lambda: now == kept


def _is_marker(scalar: torch.Tensor) -> bool:
    if scalar.device.type != "cpu":
        return True  # reading it would make the computation wait for the device
    if scalar.dtype.is_floating_point or scalar.dtype.is_complex:
        value = scalar.item()
        return bool(value != value)  # NaN alone; asked of a number it costs a fifth of `torch.isnan`
    return bool(scalar == _marker(scalar.dtype, scalar.device))


def converted(name: str, found: torch.dtype, kept: torch.dtype) -> TiermemError:
    """The error of a placeholder that has become one of another dtype than the values it stands for."""
    return TiermemError(
        f"parameter {name} was converted to {found} after offload (model.half(), model.to()), but its values are kept "
        f"as {kept}. That is undone for the parameters, not for buffers: choose Config(param_dtype=...), or keep_dtype "
        "for what is kept, and convert what else there is before offload"
    )


def reshaped(name: str, found: torch.Size, kept: tuple[int, ...]) -> str:
    """What is said of a parameter that was given values of another shape."""
    return (
        f"parameter {name} was given values of shape {tuple(found)}, expected {tuple(kept)}. They are dropped: shapes "
        "stay what they were. Change them (as resize_token_embeddings does) before tiermem.offload, or after "
        "runtime.close(restore_model=True), and offload the model then"
    )
