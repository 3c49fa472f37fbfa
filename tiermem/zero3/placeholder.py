"""What stands in for a parameter while its unit is sharded.

Owns one scalar per parameter, dtype and device, expanded to any shape. Does not know units. Guarantees true shape,
dtype and device at no memory, that reading a floating-point placeholder gives NaN, and that a write into one is
noticed.

A write into an expanded tensor mostly raises in torch itself, but `fill_`, `zero_` and writes into tensors of one
element go through and change the scalar. `check` finds them.
"""

from __future__ import annotations

import torch

from tiermem.errors import TiermemError

_IN_A_ROW = 256


class Placeholders:
    """The scalars behind all placeholders of a model, one for each parameter.

    No two have an address, or in host memory a storage, in common: by these people tell which parameters are tied.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[int, torch.dtype, torch.device], _Row] = {}
        self._expanded: dict[tuple[int, tuple[int, ...], torch.dtype, torch.device], torch.Tensor] = {}
        self._addresses: set[int] = set()

    def of(self, parameter: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor of this shape, dtype and device, for a parameter by number, without room for its elements."""
        found = self._expanded.get((parameter, shape, dtype, device))
        if found is None:
            number, place = divmod(parameter, _IN_A_ROW)
            row = self._rows.get((number, dtype, device))
            if row is None:
                row = self._rows[number, dtype, device] = _Row(dtype, device)
            scalar = row.scalar(place)
            self._addresses.add(scalar.data_ptr())
            found = self._expanded[parameter, shape, dtype, device] = scalar.expand(shape)
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
        written = [key for key, row in self._rows.items() if not row.is_unwritten()]
        for key in written:
            self._rows[key].mend()
        if written:
            dtypes = ", ".join(dict.fromkeys(str(dtype) for _, dtype, _ in written))
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


class _Row:
    """Scalars side by side, so that one look at their bytes finds what was written into any."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._marker = _marker(dtype, device)
        self._markers = self._marker.repeat(_IN_A_ROW)
        # Bytes of ours: an operation of torch's costs more, and lets others run. On a device it would be waited for.
        self._bytes = self._markers.view(torch.uint8).numpy() if device.type == "cpu" else None
        self._kept = b"" if self._bytes is None else self._bytes.tobytes()

    def scalar(self, place: int) -> torch.Tensor:
        """One of them, 0-d; in host memory a storage of its own."""
        if self._bytes is None:
            return self._markers[place]
        nbytes = self._marker.element_size()
        return torch.from_numpy(self._bytes[place * nbytes :][:nbytes]).view(self._marker.dtype)[0]

    def is_unwritten(self) -> bool:
        """Whether all are still what they were; of those on a device nobody asks."""
        return self._bytes is None or self._bytes.tobytes() == self._kept  # a tenth of the time that `data` takes

    def mend(self) -> None:
        """Make them what they were."""
        self._markers.copy_(self._marker)


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
