"""`moments="int8"`: the same bits in every schedule and after a resume, fewer bytes, and who keeps float32 moments."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from doubles_combinations import in_turn, some_of
from doubles_commit import Training, check_equal, make_config, undisturbed
from doubles_scenarios import Wide, loop, wide_batch
from doubles_training import Outcome, check, config_for, least_budget, offloaded
from torch import nn

import tiermem
from tiermem.optim.blocks import BLOCK_NUMEL


def script(trainee) -> None:
    loop(wide_batch, steps=5)(trainee)


class WideIn(Wide):
    """Inputs in the parameters' dtype."""

    def forward(self, x):
        return super().forward(x.to(next(self.parameters()).dtype)).float()


@functools.cache
def reference(param_dtype: str, directory: Path) -> Outcome:
    (directory / param_dtype).mkdir()
    return offloaded(
        WideIn,
        script,
        directory / param_dtype,
        update="step",
        budget="generous",
        moments="int8",
        param_dtype=param_dtype,
        tile_size="64KiB",
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("int8")


@pytest.mark.parametrize(
    ("update", "param_dtype"), in_turn(["step", "forward", "backward", "auto"], ["float32", "bfloat16", "float16"])
)
def test_all_schedules_give_the_same_bits(param_dtype, update, directory, tmp_path):
    expected = reference(param_dtype, directory)
    found = offloaded(
        WideIn,
        script,
        tmp_path,
        update=update,
        budget="generous",
        moments="int8",
        param_dtype=param_dtype,
        tile_size="64KiB",
    )
    check(found, expected)
    assert all(weight.isfinite().all() for weight in found.weights.values())


@pytest.mark.parametrize("update", ["forward", "backward"])
def test_the_least_budget_named_works(update, tmp_path):
    for number, dtype in enumerate(("float32", "bfloat16")):
        (tmp_path / str(number)).mkdir()
        offloaded(
            WideIn, script, tmp_path / str(number), update=update, budget="least", moments="int8", param_dtype=dtype
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_goes_on_bit_for_bit(dtype, tmp_path):
    settings = {"update": "forward", "param_dtype": dtype, "moments": "int8"}
    losses, state = undisturbed(tmp_path / "plain", 4, **settings)
    (tmp_path / "run").mkdir()
    config = make_config(tmp_path / "run", **settings)
    found = []
    for _ in range(2):
        training = Training(config, resume="auto")
        for _ in range(2):
            found.append(training.step())
            training.commit()
        if training.done == 4:
            check_equal(training.state(), state)
        training.close()
    assert found == losses


@pytest.mark.parametrize(("before", "after"), [("int8", "float32"), ("float32", "int8")])
def test_a_resume_with_other_moments_is_refused(before, after, tmp_path):
    training = Training(make_config(tmp_path, moments=before))
    training.step()
    training.commit().wait()
    training.close()
    with pytest.raises(tiermem.ResumeError, match=f"moments was {before}, is {after}"):
        Training(make_config(tmp_path, moments=after), resume=True)
    again = Training(make_config(tmp_path, moments=before), resume=True)
    again.step()
    again.close()


class WithTable(nn.Module):
    """An embedding tied to the output, one large matrix, one small one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(200, 32)
        self.large = nn.Linear(32, 256)
        self.small = nn.Linear(256, 15)
        self.back = nn.Linear(15, 32)
        self.head = nn.Linear(32, 200, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(self.back(self.small(self.large(self.table(tokens)))))


def test_embeddings_and_small_parameters_keep_float32_moments(tmp_path):
    """Their moments have the bits of AdamW's; a block of 8-bit moments has 256 values at most."""
    torch.manual_seed(0)
    model = WithTable()
    plain = WithTable()
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)
    with tiermem.offload(model, config_for(tmp_path, "1MiB", "forward", moments="int8")) as runtime:
        ours = tiermem.AdamW(model.parameters(), lr=1e-3)
        tokens = torch.randint(0, 200, (4, 16))
        for trained, stepped in ((model, ours), (plain, optimizer)):
            trained(tokens).square().mean().backward()
            stepped.step()
        runtime.settle()
        states = runtime._house.states
        kept = {}
        for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            unit, slot = runtime._house.gatherer.slots[id(mine)]
            first, second = states.read_moments(unit, slot.parameter)
            entry = optimizer.state[theirs]
            exact = (
                torch.equal(first, entry["exp_avg"].reshape(-1)),
                torch.equal(second, entry["exp_avg_sq"].reshape(-1)),
            )
            kept[name] = all(exact)
            largest = entry["exp_avg"].abs().max()
            assert (first - entry["exp_avg"].reshape(-1)).abs().max() <= 0.0075 * largest
            assert len(first[:BLOCK_NUMEL].unique()) <= 256
        assert [name for name, exact in kept.items() if not exact] == ["large.weight"]


def test_writing_parameters_leaves_moments_as_they_are(tmp_path):
    model = WideIn()
    with tiermem.offload(
        model, config_for(tmp_path, "4MiB", "step", moments="int8", param_dtype="bfloat16")
    ) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        wide_batch(model).backward()
        optimizer.step()
        weight = model.layers[1].up.weight
        unit, slot = runtime._house.gatherer.slots[id(weight)]
        before = runtime._house.states.read_moments(unit, slot.parameter)
        assert before[0].any()
        with runtime.gathered(weight, write=True), torch.no_grad():
            weight.mul_(0.5)
        after = runtime._house.states.read_moments(unit, slot.parameter)
        assert all(map(torch.equal, before, after))


def test_state_takes_less_than_half_of_the_bytes(tmp_path):
    """bfloat16 parameters: 10 bytes of state per element, and about 4; the least budget shrinks with it."""
    from tiermem.runtime.blueprint import draw

    taken = {}
    for moments in ("float32", "int8"):
        config = config_for(tmp_path, "64MiB", "step", moments=moments, param_dtype="bfloat16")
        blueprint = draw(nn.Linear(2048, 512, bias=False), config, None)
        taken[moments] = sum(nbytes for _, nbytes in blueprint.state_pages) / (2048 * 512)
    assert taken["float32"] == 10.0
    assert 4.1 < taken["int8"] < 4.17
    least = [least_budget(WideIn(), tmp_path, moments=moments) for moments in taken]
    assert least[1] < least[0]


@pytest.mark.parametrize("dtype", some_of(["float32", "bfloat16"], ["float16"]))
def test_a_snapshot_is_continued_with_the_same_bits_in_the_same_tiles(dtype, tmp_path):
    """With other tiles blocks begin elsewhere, and moments are rounded once more; also with int8 from float32."""
    settings = {"param_dtype": dtype, "moments": "int8"}
    losses, state = undisturbed(tmp_path / "plain", 4, **settings)
    for name in ("first", "second", "third"):
        (tmp_path / name).mkdir()
    first = Training(make_config(tmp_path / "first", **settings))
    found = [first.step() for _ in range(2)]
    extra = {"step": first.done, "scheduler": first.scheduler.state_dict()}
    first.runtime.snapshot(tmp_path / "copy", extra).wait()
    before = first.state()
    first.close()
    second = Training(make_config(tmp_path / "second", **settings), resume=tmp_path / "copy")
    check_equal(second.state(), before)
    found += [second.step() for _ in range(2)]
    check_equal(second.state(), state)
    assert found == losses
    second.close()
    exact = Training(make_config(tmp_path / "third", param_dtype=dtype), resume=tmp_path / "copy")
    check_equal(exact.state(), before)
    exact.step()
    exact.close()
