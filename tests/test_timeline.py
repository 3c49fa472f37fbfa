"""The trace is bounded, complete, and something Perfetto can read."""

import itertools
import json
import threading
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tiermem.timeline import Event, Timeline, chrome_trace


def _spans(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for entry in trace["traceEvents"] if entry["ph"] == "X"]


def test_the_file_has_what_perfetto_needs(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.record("read unit 3", "swap->host", 10.0, 10.5, {"nbytes": 4096, "key": Path("x")})
    timeline.record("forward", "compute", 10.25, 11.0)
    timeline.write(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["displayTimeUnit"] == "ms"
    names = {entry["tid"]: entry["args"]["name"] for entry in trace["traceEvents"] if entry["name"] == "thread_name"}
    assert any(entry["name"] == "process_name" for entry in trace["traceEvents"])
    assert sorted(names.values()) == ["compute", "swap->host"]
    read, forward = _spans(trace)
    assert (read["name"], names[read["tid"]], read["ts"], read["dur"]) == ("read unit 3", "swap->host", 0.0, 500000.0)
    assert read["args"] == {"nbytes": 4096, "key": "x"}
    assert (forward["ts"], forward["dur"]) == (250000.0, 750000.0)
    for entry in trace["traceEvents"]:
        assert {"ph", "name", "pid", "tid", "args"} <= entry.keys()


def test_levels_become_counters_on_the_same_clock(tmp_path: Path) -> None:
    timeline = Timeline(capacity=2)
    for moment in (9.0, 10.0, 11.0):
        timeline.level("reserved HOST", moment, 100 * moment)
    timeline.record("forward", "compute", 10.5, 11.0)
    assert [moment for _, moment, _ in timeline.levels()] == [10.0, 11.0]
    timeline.write(tmp_path / "trace.json")
    entries = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    counters = [(entry["name"], entry["ts"], entry["args"]["value"]) for entry in entries if entry["ph"] == "C"]
    assert counters == [("reserved HOST", 0.0, 1000.0), ("reserved HOST", 1e6, 1100.0)]
    assert [entry["ts"] for entry in entries if entry["ph"] == "X"] == [500000.0]


def test_only_the_newest_events_are_kept() -> None:
    timeline = Timeline(capacity=3)
    for number in range(10):
        timeline.record(str(number), "lane", number, number + 1)
    assert [event.name for event in timeline.events()] == ["7", "8", "9"]


def test_threads_may_record_while_another_writes(tmp_path: Path) -> None:
    timeline = Timeline(capacity=500)

    def record() -> None:
        for number in range(2000):
            timeline.record("x", threading.current_thread().name, number, number + 1)

    threads = [threading.Thread(target=record) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        timeline.write(tmp_path / "trace.json")
    for thread in threads:
        thread.join()
    assert len(timeline.events()) == 500


_moments = st.integers(0, 30)


@given(st.lists(st.tuples(_moments, _moments, st.sampled_from("ab")), max_size=30))
def test_events_of_a_row_nest_or_do_not_overlap_and_none_is_lost(spans: list[tuple[int, int, str]]) -> None:
    events = [Event(str(index), lane, start, start + length, {}) for index, (start, length, lane) in enumerate(spans)]
    drawn = _spans(chrome_trace(events, process=1))
    assert sorted(entry["name"] for entry in drawn) == sorted(event.name for event in events)
    for one, other in itertools.combinations(drawn, 2):
        if one["tid"] != other["tid"]:
            continue
        assert one["cat"] == other["cat"]
        first, second = sorted((one, other), key=lambda entry: (entry["ts"], -entry["dur"]))
        first_end, second_end = first["ts"] + first["dur"], second["ts"] + second["dur"]
        assert second["ts"] >= first_end or second_end <= first_end
