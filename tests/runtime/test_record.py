"""What a commit says about the layout of pages: the first difference is named, an older record is no other one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from doubles_training import MIB, config_for
from torch import nn

from tiermem.errors import ResumeError
from tiermem.runtime.blueprint import draw
from tiermem.runtime.record import layout_record, require_same_layout


def record_of(*layers: nn.Module, directory: Path, **settings: Any) -> dict[str, Any]:
    model = nn.ModuleDict({"layers": nn.ModuleList(layers)})
    config = config_for(directory, 32 * MIB, "step", **settings)
    return layout_record(draw(model, config, None).layouts, config, 4096)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([nn.Linear(4, 4), nn.Linear(4, 4, bias=False)], r"parameter layers\.1\.bias was \[4\], is not there"),
        ([nn.Linear(4, 4)], r"parameter layers\.1\.weight was \[4, 4\], is not there"),
        (
            [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)],
            r"parameter layers\.2\.weight was not there, is \[4, 4\]",
        ),
        ([nn.Linear(4, 4), nn.Linear(4, 8)], r"parameter layers\.1\.weight was \[4, 4\], is \[8, 4\]"),
    ],
)
def test_a_model_with_less_or_more_of_the_same_is_another(
    layers: list[nn.Module], message: str, tmp_path: Path
) -> None:
    committed = record_of(nn.Linear(4, 4), nn.Linear(4, 4), directory=tmp_path)
    require_same_layout(committed, record_of(nn.Linear(4, 4), nn.Linear(4, 4), directory=tmp_path))
    with pytest.raises(ResumeError, match=f"this is not the run that was committed: {message}"):
        require_same_layout(committed, record_of(*layers, directory=tmp_path))


def test_the_same_parameters_in_other_units_are_another_layout(tmp_path: Path) -> None:
    committed = record_of(nn.Linear(4, 4), nn.Linear(4, 4), directory=tmp_path)
    (name, slots), *others = committed["units"]
    apart = committed | {"units": [[name, slots[:1]], [f"{name}.bias", slots[1:]], *others]}
    with pytest.raises(ResumeError, match=r"the number of parameters in unit '\S+' was 2, is 1"):
        require_same_layout(committed, apart)


def test_what_records_did_not_say_at_first_is_as_it_was_then(tmp_path: Path) -> None:
    here = record_of(nn.Linear(4, 4), directory=tmp_path)
    later = ("copies", "stage", "kept", "coalesce")
    require_same_layout({name: value for name, value in here.items() if name not in later}, here)
    for name in later:
        with pytest.raises(ResumeError, match=f"{name} was None, is 2"):
            require_same_layout(here, here | {name: 2})
