"""The text of a simulated device."""

import math

import pytest

from tiermem.config import Config, resolve_device
from tiermem.errors import ConfigError
from tiermem.memory.links import Link, parse_link


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("cpu", None),
        ("cuda:1", None),
        ("simulated", Link(math.inf, math.inf, 0.0)),
        ("simulated:bandwidth=12GB/s", Link(12e9, 12e9, 0.0)),
        ("simulated:up=1GiB/s,down=500MB/s,latency=10us", Link(2.0**30, 5e8, 1e-5)),
        ("simulated:latency=1.5ms,bandwidth=1B/s", Link(1.0, 1.0, 0.0015)),
    ],
)
def test_text_means_a_link(text: str, link: Link | None) -> None:
    assert parse_link(text) == link


@pytest.mark.parametrize(
    "text",
    [
        "simulated:",
        "simulated:fast",
        "simulated:sideways=1GB/s",
        "simulated:up=1GB/s,Down=1GB/s",
        "simulated:bandwidth=12GB",
        "simulated:bandwidth=0GB/s",
        "simulated:up=x/s",
        "simulated:latency=10",
        "simulated:latency=-1s",
        "simulated:latency=1s,",
    ],
)
def test_what_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^device: "):
        parse_link(text)
    with pytest.raises(ConfigError):
        Config(device=text, swap_dirs=["run"])


def test_torch_computes_on_the_processor() -> None:
    config = Config(device="simulated:latency=1ms", swap_dirs=["run"])
    assert resolve_device(config).type == "cpu"
    assert Config.from_dict(config.to_dict()) == config
