"""Buffers that a model makes, grows or keeps in odd forms: trained with, committed, resumed, kept in snapshots."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from doubles_training import MIB, config_for
from safetensors.torch import load_file, save_file
from torch import nn

import tiermem
from tiermem.checkpoint.reading import open_snapshot
from tiermem.checkpoint.tensor_file import bytes_of
from tiermem.checkpoint.tensor_writer import TensorWriter

# torch 2.11 says it once a process, also where it is told not to check.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


class Odd(nn.Module):
    """A mask made in the first forward, a bank of rows that grows, a running count of another dtype later on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mask", None, persistent=False)
        self.register_buffer("bank", torch.zeros(0, 6))
        self.register_buffer("count", torch.zeros((), dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.register_buffer("mask", torch.ones(6, 6).tril(), persistent=False)
        with torch.no_grad():
            self.bank = torch.cat([self.bank, x[:1]])
            self.count = self.count.long() + 1
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.full((2,), 0.5))
        self.late.mul_(0.5)
        return self.linear(x) @ self.mask + self.bank.mean(0) * self.late.sum() / self.count


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(Odd(), Odd())


def train(net: nn.Module, steps: int) -> list[float]:
    optimizer = tiermem.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = net(torch.randn(3, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("by", ["commit", "snapshot"])
def test_buffers_that_training_made_come_back(tmp_path: Path, by: str) -> None:
    for name in ("run", "other", "plain"):
        (tmp_path / name).mkdir()
    with tiermem.offload(net := model(), config_for(tmp_path / "run", 8 * MIB, "step")) as runtime:
        torch.manual_seed(2)
        train(net, 2)
        runtime.commit().wait()
        runtime.snapshot(tmp_path / "snapshot").wait()
        kept = {each.names[0] for each in open_snapshot(tmp_path / "snapshot").manifest.buffers}
        assert {"0.bank", "0.late"} <= kept, "or they could not be exported"
        expected = {name: buffer.clone() for name, buffer in net.named_buffers()}
        following = train(net, 2)
    directory, resume = (tmp_path / "run", True) if by == "commit" else (tmp_path / "other", tmp_path / "snapshot")
    with tiermem.offload(net := model(), config_for(directory, 8 * MIB, "step"), resume=resume) as runtime:
        found = dict(net.named_buffers())
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            assert found[name].dtype == values.dtype, name
            assert torch.equal(found[name], values), name
        assert net[0]._non_persistent_buffers_set == {"mask"}
        assert train(net, 2) == following
        runtime.commit().wait()  # what was restored is part of the next one, too
    with tiermem.offload(net := model(), config_for(directory, 8 * MIB, "step"), resume=True):
        assert len(net[0].bank) == 4


def test_a_buffer_of_another_model_is_an_error(tmp_path: Path) -> None:
    def other(size: int) -> nn.Module:
        net = nn.Linear(2, 2)
        net.register_buffer("scale", torch.ones(size))
        return net

    with tiermem.offload(net := other(3), config_for(tmp_path, 8 * MIB, "step")) as runtime:
        net.scale.mul_(2)
        runtime.commit().wait()
    with pytest.raises(tiermem.ResumeError, match=r"buffer scale: expected \[3\] of torch.float32.*found \[4\]"):
        tiermem.offload(net := other(4), config_for(tmp_path, 8 * MIB, "step"), resume=True)
    assert type(net.weight) is nn.Parameter, "nobody is there to be asked for its values"
    with pytest.raises(tiermem.TiermemError, match="Where offload itself has failed, build the model again"):
        net(torch.ones(1, 2))


def test_statistics_that_a_model_came_with_are_committed_too(tmp_path: Path) -> None:
    """As of a pretrained model: for the resume it is built without its weights."""

    def built(size: int = 3) -> nn.Module:
        net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
        net.register_buffer("table", torch.zeros(size))
        net.register_buffer("scratch", torch.zeros(1), persistent=False)
        return net

    net = built()
    net[1].running_mean.fill_(4.0)
    net.scratch.fill_(4.0)
    with tiermem.offload(net, config_for(tmp_path, 8 * MIB, "step")) as runtime:
        runtime.commit().wait()
    for size in (3, 5):  # nobody has changed the table, which the program may build in another size
        with tiermem.offload(net := built(size), config_for(tmp_path, 8 * MIB, "step"), resume=True) as runtime:
            assert net[1].running_mean.tolist() == [4.0, 4.0, 4.0]
            assert net.table.tolist() == [0.0] * size
            assert net.scratch.tolist() == [0.0], "what state_dict does not hold is the program's"
            runtime.commit().wait()  # what was restored is part of the next one, too


def test_a_resume_with_another_table_that_is_too_large_to_commit_says_so(tmp_path: Path) -> None:
    def built(value: float) -> nn.Module:
        net = nn.Linear(2, 2)
        net.register_buffer("table", torch.full((20_000,), value))
        return net

    with tiermem.offload(built(1.0), config_for(tmp_path, 8 * MIB, "step")) as runtime:
        runtime.commit().wait()
    with tiermem.offload(built(1.0), config_for(tmp_path, 8 * MIB, "step"), resume=True):
        pass
    with (
        pytest.warns(RuntimeWarning, match=r"buffer table \(78.12 KiB\) has other values than"),
        tiermem.offload(net := built(2.0), config_for(tmp_path, 8 * MIB, "step"), resume=True),
    ):
        assert net.table[0] == 2.0


class Tables(nn.Linear):
    """Buffers that nobody but its constructor writes."""

    def __init__(self, *, persistent: bool = True) -> None:
        super().__init__(4, 4)
        self.register_buffer("scale", torch.tensor([1.0, float("nan")]), persistent=persistent)
        self.register_buffer("mask", torch.tensor([True, False]), persistent=persistent)
        self.register_buffer("bytes", torch.zeros(3, dtype=torch.uint8), persistent=persistent)
        links = torch.sparse_coo_tensor(torch.zeros(2, 1), torch.ones(1), (2, 2), check_invariants=False)
        self.register_buffer("links", links, persistent=persistent)


@pytest.mark.parametrize("by", ["commit", "snapshot"])
def test_buffers_without_storage_that_a_commit_fills_are_filled(tmp_path: Path, by: str) -> None:
    for name in ("run", "other"):
        (tmp_path / name).mkdir()
    with tiermem.offload(trained := Tables(), config_for(tmp_path / "run", 8 * MIB, "step")) as runtime:
        trained.links = trained.links * 2  # else nobody but the program knows of a sparse one
        expected = copy.deepcopy(dict(trained.named_buffers()))
        runtime.commit().wait()
        runtime.snapshot(tmp_path / "snapshot").wait()
    with torch.device("meta"):
        net = Tables()
    directory, resume = (tmp_path / "run", True) if by == "commit" else (tmp_path / "other", tmp_path / "snapshot")
    with tiermem.offload(net, config_for(directory, 8 * MIB, "step"), resume=resume) as runtime:
        for name, buffer in net.named_buffers():
            assert torch.equal(buffer.to_dense().nan_to_num(9), expected[name].to_dense().nan_to_num(9)), name
        runtime.commit().wait()
    with tiermem.offload(net := Tables(), config_for(directory, 8 * MIB, "step"), resume=True):
        assert net.links.to_dense().tolist() == [[2, 0], [0, 0]]


def test_buffers_without_storage_that_a_commit_does_not_hold_are_named(tmp_path: Path) -> None:
    with tiermem.offload(Tables(persistent=False), config_for(tmp_path, 8 * MIB, "step")) as runtime:
        runtime.commit().wait()
    with torch.device("meta"):
        net = Tables(persistent=False)
    with pytest.raises(tiermem.ConfigError, match="buffer scale is on the meta device"):
        tiermem.offload(net, config_for(tmp_path, 8 * MIB, "step"), resume=True)


def test_buffers_without_storage_that_weights_fill_are_filled(tmp_path: Path) -> None:
    """Also those that hold what marks such as have no values: not a number, or False all over."""
    (tmp_path / "run").mkdir()
    plain = Tables()
    del plain.links  # no file has it
    save_file(plain.state_dict(), tmp_path / "all.safetensors")
    with torch.device("meta"):
        net = Tables()
    del net.links
    weights = tmp_path / "all.safetensors"
    with tiermem.offload(net, config_for(tmp_path / "run", 8 * MIB, "step"), weights=weights):
        for name, buffer in plain.named_buffers():
            assert torch.equal(net.get_buffer(name).nan_to_num(9), buffer.nan_to_num(9)), name


def test_a_buffer_that_cannot_be_made_again_is_named(tmp_path: Path) -> None:
    with tiermem.offload(net := nn.Linear(2, 2), config_for(tmp_path, 8 * MIB, "step")) as runtime:
        net.register_buffer("scale", torch.ones(3))
        runtime.commit().wait()
    again = nn.Linear(2, 2)
    again.scale = 5
    with pytest.raises(
        tiermem.ResumeError, match=r"buffer scale, made during training, cannot be made again: .*exists"
    ):
        tiermem.offload(again, config_for(tmp_path, 8 * MIB, "step"), resume=True)


FORMS = {
    "sparse rows": lambda: torch.eye(6).to_sparse(),
    "compressed": lambda: torch.eye(6).to_sparse_csr(),
    "conjugate": lambda: torch.randn(6, 6, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(6, 6, dtype=torch.complex64).conj().imag,
    "expanded": lambda: torch.randn(6).expand(6, 6),
    "one element far from the next": lambda: torch.randn(6, 6)[:1, 3],
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:Validating sparse tensor invariants")
@pytest.mark.parametrize("form", FORMS)
def test_forms_that_are_not_plain_memory(tmp_path: Path, form: str) -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.linear = nn.Linear(6, 6)
            self.register_buffer("links", FORMS[form]())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            links = self.links.to_dense() if self.links.layout is not torch.strided else self.links
            return links.real.float().sum() * self.linear(x)

    for name in ("run", "other"):
        (tmp_path / name).mkdir()
    with tiermem.offload(net := Graph(), config_for(tmp_path / "run", 8 * MIB, "step")) as runtime:
        optimizer = tiermem.AdamW(net.parameters())
        net(torch.randn(6, 6)).square().mean().backward()
        optimizer.step()
        if form != "expanded":
            net.links = (2 * net.links).coalesce() if form == "sparse rows" else 2 * net.links
        expected = net.links.to_dense() if net.links.layout is not torch.strided else net.links.clone()
        runtime.commit().wait()
        runtime.snapshot(tmp_path / "snapshot").wait()
    for directory, resume in (("run", True), ("other", tmp_path / "snapshot")):
        with tiermem.offload(net := Graph(), config_for(tmp_path / directory, 8 * MIB, "step"), resume=resume):
            found = net.links.to_dense() if net.links.layout is not torch.strided else net.links
            assert torch.equal(found, expected)


ODD_DTYPES = {
    "complex128": lambda seed: torch.full((3, 2), seed + 1j / 3, dtype=torch.complex128),
    "complex32": lambda seed: torch.full((3,), seed + 1j, dtype=torch.complex32),
    "scales of eight bits": lambda seed: torch.tensor([0.5, 2.0**seed]).to(torch.float8_e8m0fnu),
    "without a negative zero": lambda seed: torch.tensor([0.5, seed]).to(torch.float8_e4m3fnuz),
    "quantized": lambda seed: torch.quantize_per_tensor(torch.tensor([0.5, -seed]), seed / 10, 3, torch.qint8),
}


@pytest.mark.filterwarnings(
    "ignore:ComplexHalf support is experimental",
    "ignore:torch.quantize_per_tensor",
    "ignore:TypedStorage is deprecated",
)
@pytest.mark.parametrize("changed", [True, False])
@pytest.mark.parametrize("kind", ODD_DTYPES)
def test_dtypes_that_few_files_have_come_back(tmp_path: Path, kind: str, changed: bool) -> None:
    def built() -> nn.Module:
        net = nn.Linear(2, 2)
        net.register_buffer("table", ODD_DTYPES[kind](1.0))
        return net

    for name in ("run", "other"):
        (tmp_path / name).mkdir()
    expected = ODD_DTYPES[kind](2.0 if changed else 1.0)
    with tiermem.offload(net := built(), config_for(tmp_path / "run", 8 * MIB, "step")) as runtime:
        if changed:
            net.table = ODD_DTYPES[kind](2.0)
        runtime.commit().wait()
        runtime.snapshot(tmp_path / "snapshot").wait()
        if kind == "scales of eight bits":
            runtime.save_pretrained(tmp_path / "saved")
            (file,) = (tmp_path / "saved").glob("*.safetensors")
            assert bytes(bytes_of(expected)) in file.read_bytes()
        else:
            with pytest.raises(tiermem.ConfigError, match=r"buffer table is of torch\..*safetensors files hold.* C64"):
                runtime.save_pretrained(tmp_path / "saved")
            assert not list(tmp_path.glob("*saved*"))
    for directory, resume in (("run", True), ("other", tmp_path / "snapshot")):
        with tiermem.offload(net := built(), config_for(tmp_path / directory, 8 * MIB, "step"), resume=resume):
            assert net.table.dtype == expected.dtype
            assert bytes(bytes_of(net.table)) == bytes(bytes_of(expected))
            if expected.is_quantized:
                assert net.table.q_scale() == expected.q_scale()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", ODD_DTYPES)
def test_they_stay_where_parameters_are_absent(tmp_path: Path, kind: str) -> None:
    """Beside those of the same module, and beside present ones of a model that has absent ones."""
    net = nn.ModuleList([nn.Linear(2, 2)])
    with tiermem.deferred_init():
        net.append(nn.Linear(2, 2))
    for layer in net:
        layer.register_buffer("table", ODD_DTYPES[kind](1.0))
    with tiermem.offload(net, config_for(tmp_path, 8 * MIB, "step")):
        for layer in net:
            assert bytes(bytes_of(layer.table)) == bytes(bytes_of(ODD_DTYPES[kind](1.0)))


def test_what_is_expanded_stays_beside_an_absent_parameter(tmp_path: Path) -> None:
    with tiermem.deferred_init():
        net = nn.Linear(2, 2)
        net.register_buffer("unknown", torch.tensor(float("nan")).expand(3))
    with tiermem.offload(net, config_for(tmp_path, 8 * MIB, "step")):
        assert net.unknown.isnan().all()
        assert net.unknown.stride() == (0,)


def test_what_no_file_can_hold_is_said_before_any_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[object] = []
    monkeypatch.setattr(TensorWriter, "__init__", lambda *given, **_: written.append(given))
    net = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9))
    net.register_parameter("turns", nn.Parameter(torch.ones(2, dtype=torch.complex128), requires_grad=False))
    said = r"parameter turns is of torch.complex128: safetensors files hold"
    with tiermem.offload(net, config_for(tmp_path, 8 * MIB, "step")) as runtime:
        with pytest.raises(tiermem.ConfigError, match=said):
            runtime.save_pretrained(tmp_path / "saved", max_shard_size=400)
        with pytest.raises(tiermem.ConfigError, match=said):
            runtime.snapshot(tmp_path / "snapshot")
        runtime.commit().wait()
    assert not written
    assert not list(tmp_path.glob("*saved*"))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_buffer_is_refused_by_its_name(tmp_path: Path, layout: torch.layout) -> None:
    def nested() -> torch.Tensor:
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)

    net = nn.Linear(2, 2)
    net.register_buffer("rows", nested())
    said = r"buffer rows is a nested tensor.*to_padded_tensor"
    with pytest.raises(tiermem.ConfigError, match=said):
        tiermem.offload(net, config_for(tmp_path, 8 * MIB, "step"))
    assert not list(tmp_path.iterdir())
    del net.rows
    net.attribute = nested()
    with tiermem.offload(net, config_for(tmp_path, 8 * MIB, "step")) as runtime:
        runtime.commit().wait()
        net.register_buffer("rows", nested())
        for verb in (runtime.commit, lambda: runtime.snapshot(tmp_path / "snapshot")):
            with pytest.raises(tiermem.ConfigError, match=said):
                verb()
        with pytest.raises(tiermem.ConfigError, match=r"buffer rows is nested"):
            runtime.save_pretrained(tmp_path / "saved")
        del net.rows
        runtime.commit().wait()


def test_buffers_may_be_resized(tmp_path: Path) -> None:
    """As torch's observers of quantization do; looking at their bytes by numpy would forbid it for good."""
    net = nn.Linear(2, 2)
    net.register_buffer("seen", torch.zeros(3))
    with tiermem.offload(net, config_for(tmp_path, 8 * MIB, "step")) as runtime:
        net.seen.resize_(5)
        runtime.commit().wait()
        runtime.save_pretrained(tmp_path / "saved")
        net.seen.resize_(7)


def test_a_conjugate_is_exported_by_its_values(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    net.register_buffer("phases", torch.tensor([1 + 2j, 3 - 4j]).conj())
    expected = net.phases.resolve_conj()
    with tiermem.offload(net, config_for(tmp_path, 8 * MIB, "step")) as runtime:
        runtime.save_pretrained(tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.safetensors")
    assert torch.equal(load_file(file)["phases"], expected)


@pytest.mark.parametrize(
    "odd",
    [
        torch.ones(3, 2).t(),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch._neg_view(torch.ones(2)),
        torch.ones(2, device="meta"),
    ],
)
def test_only_plain_memory_is_taken_for_bytes(odd: torch.Tensor) -> None:
    with pytest.raises(tiermem.InvariantError, match="the bytes of a plain tensor in one piece"):
        bytes_of(odd)
