"""Knobs: what is accepted, what is refused and how it is said, what files give back."""

import copy
import dataclasses
import inspect
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.config import Config, resolve_device, resolve_host_memory
from tiermem.errors import ConfigError, TiermemError

GIB = 1 << 30


def test_the_example_of_the_public_face() -> None:
    config = Config(
        device="auto",
        device_memory="20GiB",
        host_memory="48GiB",
        swap_dirs=["/nvme0/run7", "/nvme1/run7"],
        param_dtype="bfloat16",
        moments="float32",
        update="auto",
        stage=3,
    )
    assert (config.device_nbytes, config.host_nbytes) == (20 * GIB, 48 * GIB)
    assert config.swap_paths == (Path("/nvme0/run7"), Path("/nvme1/run7"))
    assert config.dtype is torch.bfloat16
    assert (config.block_nbytes, config.tile_nbytes, config.look_ahead_nbytes) == (8 << 20, None, None)


def test_at_most_twenty_knobs() -> None:
    assert len(dataclasses.fields(Config)) <= 20


def test_help_and_editors_are_shown_the_knobs_and_their_defaults() -> None:
    shown = inspect.signature(Config).parameters
    assert {name: knob.default for name, knob in shown.items()} == {
        field.name: field.default for field in dataclasses.fields(Config)
    }
    assert {knob.kind for knob in shown.values()} == {inspect.Parameter.KEYWORD_ONLY}


def test_what_means_the_same_is_equal() -> None:
    text = Config(swap_dirs="a", host_memory="1GiB", param_dtype="float16", device="cuda:1", stall_timeout=3)
    objects = Config(
        swap_dirs=(Path("a"),),
        host_memory=GIB,
        param_dtype=torch.float16,
        device=torch.device("cuda", 1),  # type: ignore[arg-type]
        stall_timeout=3.0,
    )
    assert text == objects
    assert hash(text) == hash(objects)


def test_a_single_directory_needs_no_list(tmp_path: Path) -> None:
    """Neither where it runs nor where types are checked, as those of this test are."""
    config = Config(swap_dirs=Path("a"))
    assert config == Config(swap_dirs="a") == Config(swap_dirs=["a"])
    config.save(tmp_path / "settings.toml")
    assert Config.load(tmp_path / "settings.toml", swap_dirs=Path("b")).swap_paths == (Path("b"),)


def test_home_is_expanded_in_paths_only() -> None:
    config = Config(swap_dirs=["~/run"])
    assert config.swap_paths == (Path.home() / "run",)
    assert config.to_dict()["swap_dirs"] == ["~/run"]


def test_a_home_that_is_not_there_is_a_name_like_any_other() -> None:
    path = Path("~nobody-has-this-name/run.toml")
    config = Config(swap_dirs=path)
    assert config.swap_paths == (path,)
    with pytest.raises(ConfigError, match=f"cannot read settings from {path}"):
        Config.load(path)
    with pytest.raises(FileNotFoundError, match=str(path)):
        config.save(path)


@pytest.mark.parametrize(
    ("knob", "value", "message"),
    [
        ("swap_dirs", [], "one or more directories"),
        ("swap_dirs", [""], "paths of directories"),
        ("swap_dirs", [3], "paths of directories"),
        ("swap_dirs", b"a", "one or more directories"),
        ("swap_dirs", 3, "one or more directories"),
        ("swap_dirs", ["a", "./a"], "each directory once"),
        ("swap_dirs", ["bad\udcff"], "paths of directories that are UTF-8"),
        ("param_dtype", "float8", "'float32', 'bfloat16', 'float16'"),
        ("param_dtype", torch.int8, "found 'int8'"),
        ("moments", "int4", "'float32', 'int8'"),
        ("update", "lazy", "'backward', 'forward', 'step', 'auto'"),
        ("stage", 4, "from 1 to 3"),
        ("stage", 0, "from 1 to 3"),
        ("stage", True, "from 1 to 3"),
        ("stage", "3", "found '3'"),
        ("device", "tpu", "'auto', 'cpu', 'cuda'"),
        ("device", "cuda:", "'auto', 'cpu', 'cuda'"),
        ("device", None, "found None"),
        ("host_memory", -1, "at least 4KiB"),
        ("host_memory", 0, "at least 4KiB"),
        ("host_memory", "lots", "found 'lots'"),
        ("host_memory", None, "or 'auto'"),
        ("host_memory", 1.5 * 2**30, "as a whole number"),
        ("device_memory", "-3GiB", "found '-3GiB'"),
        ("block_size", "auto", "found 'auto'"),
        ("block_size", 5000, "multiples of 4096"),
        ("block_size", 1.5, "as bytes or as text"),
        ("queue_depth", 0, "from 1 to 256"),
        ("io_backend", "uring", "'threads', 'inline', 'aiofiles'"),
        ("direct", "yes", "'auto', True, False"),
        ("direct", 1, "'auto', True, False"),
        ("tile_size", 100, "at least 64KiB"),
        ("look_ahead", "-1", "found '-1'"),
        ("verify", True, "'resume', 'always', 'never'"),
        ("overwrite", "no", "True, False"),
        ("stall_timeout", 0, "positive number of seconds"),
        ("stall_timeout", float("inf"), "positive number of seconds"),
        ("stall_timeout", 10**400, "positive number of seconds"),
        ("poison", 1, "True, False"),
    ],
)
def test_bad_values_are_named_with_what_was_expected_and_found(knob: str, value: object, message: str) -> None:
    values: dict[str, Any] = {"swap_dirs": ["run"], knob: value}
    with pytest.raises(ConfigError, match=f"^{knob}: .*expected") as caught:
        Config(**values)
    assert message in str(caught.value)
    assert "found" in str(caught.value)
    assert isinstance(caught.value, TiermemError)
    assert isinstance(caught.value, ValueError)


def test_a_misspelt_knob_is_an_error_that_suggests() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'host_memroy': did you mean 'host_memory'"):
        Config.from_dict({"host_memroy": "1GiB", "swap_dirs": ["run"]})
    with pytest.raises(ConfigError, match="unknown setting 'zzz': the settings are device, "):
        Config.from_dict({"zzz": 1})
    with pytest.raises(ConfigError, match="unknown setting 'host_memroy': did you mean 'host_memory'"):
        Config(host_memroy="1GiB", swap_dirs=["run"])  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="unknown setting 'HOST_MEMORY': did you mean 'host_memory'"):
        Config.from_dict({"HOST_MEMORY": "1GiB"})


def test_a_config_can_be_copied_and_pickled() -> None:
    config = Config(swap_dirs=["run"], host_memory="1GiB", stage=2)
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == copy.copy(config) == config


def test_a_config_cannot_be_changed_but_replaced() -> None:
    config = Config(swap_dirs=["run"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.stage = 2  # type: ignore[misc]
    assert dataclasses.replace(config, stage=2).stage == 2
    with pytest.raises(ConfigError):
        dataclasses.replace(config, stage=9)


_sizes = st.one_of(st.just("auto"), st.integers(64 << 10, 1 << 50))
_names = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0/"), min_size=1, max_size=12).map(
    "run/{}x".format
)
_configs = st.builds(
    Config,
    device=st.sampled_from(["auto", "cpu", "cuda", "cuda:3"]),
    device_memory=_sizes,
    host_memory=_sizes,
    swap_dirs=st.lists(_names, min_size=1, max_size=3, unique=True),
    param_dtype=st.sampled_from([torch.float32, torch.bfloat16, "float16"]),
    moments=st.sampled_from(["float32", "int8"]),
    update=st.sampled_from(["backward", "forward", "step", "auto"]),
    stage=st.integers(1, 3),
    block_size=st.integers(1, 9999).map(lambda count: 4096 * count),
    queue_depth=st.integers(1, 256),
    io_backend=st.sampled_from(["threads", "inline", "aiofiles"]),
    direct=st.sampled_from(["auto", True, False]),
    tile_size=_sizes,
    look_ahead=_sizes,
    verify=st.sampled_from(["resume", "always", "never"]),
    overwrite=st.booleans(),
    stall_timeout=st.floats(1e-9, 1e9),
    poison=st.booleans(),
)


@settings(max_examples=60)
@given(_configs, st.sampled_from([".toml", ".json"]))
def test_what_is_saved_loads_equal(tmp_path_factory: pytest.TempPathFactory, config: Config, suffix: str) -> None:
    assert Config.from_dict(config.to_dict()) == config
    assert json.loads(json.dumps(config.to_dict())) == config.to_dict()
    file = tmp_path_factory.getbasetemp() / f"settings{suffix}"
    config.save(file)
    assert Config.load(file) == config


def test_saved_files_are_for_people(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    Config(swap_dirs=["/nvme/run"], host_memory="48GiB").save(file)
    text = file.read_text()
    assert 'host_memory = "48GiB"\n' in text
    assert 'swap_dirs = ["/nvme/run"]\n' in text
    assert "overwrite = false\n" in text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.yaml", "", "ending in .toml or .json"),
        ("run.toml", "a = = 1", "cannot read settings"),
        ("run.json", "{", "cannot read settings"),
        ("run.json", "[" * 100_000, "cannot read settings"),
        ("run.json", "[1]", "expected a table"),
        ("run.json", '{"stage": 2, "swap_dirs": ["a"], "stage": 3}', r"cannot read settings .*a key twice"),
        ("run.toml", "stage = 2\nstage = 3\nswap_dirs = ['a']", "cannot read settings"),
        ("run.toml", "stag = 3", "did you mean 'stage'"),
        ("run.toml", "stage = 7\nswap_dirs = ['a']", r"run.toml: stage: expected"),
    ],
)
def test_unreadable_files_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        Config.load(tmp_path / name)
    assert name in str(caught.value)


def test_a_mark_that_an_editor_has_put_before_the_settings_is_passed_over(tmp_path: Path) -> None:
    for name, content in (("run.toml", 'swap_dirs = ["a"]'), ("run.json", '{"swap_dirs": ["a"]}')):
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
        assert Config.load(tmp_path / name) == Config(swap_dirs=["a"])


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read settings"):
        Config.load(tmp_path / "run.toml")
    with pytest.raises(ConfigError, match="ending in"):
        Config(swap_dirs=["a"]).save(tmp_path / "run.ini")
    assert not (tmp_path / "run.ini").exists()


@pytest.mark.parametrize("found", [None, 3, b"run.toml"])
def test_what_is_no_path_of_a_settings_file_is_a_config_error(found: Any) -> None:
    said = rf"expected the path of a settings file .*, found {type(found).__name__}"
    with pytest.raises(ConfigError, match=said):
        Config.load(found)
    with pytest.raises(ConfigError, match=said):
        Config(swap_dirs="a").save(found)


def test_a_folder_is_no_settings_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").mkdir()
    with pytest.raises(ConfigError, match=r"expected a settings file ending in \.toml or \.json, found .*"):
        Config.load(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot read settings from .*run\.toml: .*directory"):
        Config.load(tmp_path / "run.toml")


def test_automatic_host_memory_leaves_a_share() -> None:
    auto = Config(swap_dirs=["run"])
    assert resolve_host_memory(auto, 64 * GIB) == 48 * GIB
    assert resolve_host_memory(auto, 6 * GIB) == 4 * GIB
    assert resolve_host_memory(auto, 2 * GIB) == GIB
    assert resolve_host_memory(auto, 10 * GIB + 5001) % 4096 == 0
    assert resolve_host_memory(dataclasses.replace(auto, host_memory="100GiB"), GIB) == 100 * GIB
    with pytest.raises(ConfigError, match="host_memory"):
        resolve_host_memory(auto, 0)


def test_the_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    auto, cpu, second = (Config(swap_dirs=["run"], device=device) for device in ("auto", "cpu", "cuda:1"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert resolve_device(auto) == torch.device("cpu") == resolve_device(cpu)
    with pytest.raises(ConfigError, match="found 0 CUDA devices"):
        resolve_device(second)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device(auto) == torch.device("cuda")
    assert resolve_device(second) == torch.device("cuda:1")
