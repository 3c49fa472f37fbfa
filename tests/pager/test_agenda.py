"""The agenda against a list of lists that is searched from end to end."""

from __future__ import annotations

from typing import Any

from doubles_combinations import number_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.pager.agenda import _FIRST, Agenda
from tiermem.pager.page import Kind, PageKey

KEYS = [PageKey(unit, Kind.STATE, tile) for unit in range(3) for tile in range(4)]
POOL = [KEYS[0:4], KEYS[4:8], KEYS[8:12], KEYS[2:6], [KEYS[0]], [KEYS[5], KEYS[0]], KEYS[0:4]]
GROUPS = st.lists(st.sampled_from(range(len(POOL))), max_size=4)
EVENTS = st.lists(st.one_of(GROUPS, st.sampled_from(KEYS)), max_size=20)


def left(agenda: Agenda) -> list[PageKey]:
    return [key for portion in agenda.portions() for key in portion]


@given(events=EVENTS)
@settings(max_examples=number_of(120, 300))
def test_what_is_announced_is_what_was_said_last_less_what_was_come_to(events: list[Any]) -> None:
    agenda, model = Agenda(), list[list[PageKey]]()
    for event in events:
        before = {key for group in model for key in group}
        if isinstance(event, list):
            changed = agenda.set([POOL[number] for number in event])
            model = [list(POOL[number]) for number in event]
            assert changed >= before ^ {key for group in model for key in group}
        else:
            agenda.tick_off(event)
            for group in model:
                if event in group:
                    group.remove(event)
                    break
        assert left(agenda) == [key for group in model for key in group]
        assert [key for key in KEYS if key in agenda.pages] == sorted({*left(agenda)}, key=KEYS.index)


def test_of_a_long_group_the_first_pages_go_before_the_rest() -> None:
    agenda, pages = Agenda(), [PageKey(0, Kind.STATE, tile) for tile in range(_FIRST + 3)]
    agenda.set([pages, KEYS[4:8]])
    assert [list(portion) for portion in agenda.portions()] == [pages[:_FIRST], pages[_FIRST:], KEYS[4:8]]


def test_an_update_that_has_come_to_all_of_a_unit_is_done_with_it() -> None:
    """Also where another order was kept: the next unit is then the one whose first pages go before the rest."""
    agenda = Agenda()
    agenda.set([KEYS[0:2], KEYS[4:6], KEYS[8:10]])
    for key in (*KEYS[4:6], *KEYS[0:2]):
        agenda.tick_off(key)
    assert [list(portion) for portion in agenda.portions()] == [KEYS[8:10], []]
