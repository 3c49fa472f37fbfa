"""The course of a step: how long pages are there, when they come again, what becomes of their contents."""

from __future__ import annotations

from tiermem.pager.course import Course, Limits
from tiermem.pager.page import Kind, Lane, PageKey
from tiermem.pager.schedule import Access

KINDS = {"p": Kind.PARAM, "g": Kind.GRAD, "s": Kind.STATE, "a": Kind.ACTIVATION, "t": Kind.TRANSIT}
ENDLESS = 10**6


def course(
    words: str,
    limits: Limits = Limits(ENDLESS),  # noqa: B008 - a value
    *,
    sizes: dict[str, int] | None = None,
    supplied: list[bool] | None = None,
) -> Course:
    """Of accesses such as p0 by the computation, P0 by the update; `sizes` where they are not 10."""
    accesses = [
        Access(Lane.COMPUTE if word[0].islower() else Lane.UPDATE, PageKey(int(word[1]), KINDS[word[0].lower()]))
        for word in words.split()
    ]
    rooms = {
        access.key: (sizes or {}).get(word.lower(), 10) for access, word in zip(accesses, words.split(), strict=True)
    }
    return Course(accesses, rooms, limits, supplied=supplied)


def test_when_each_page_comes_again():
    found = course("p0 p1 p0 g0 P1")
    assert found.following == [2, 3, 3, 5, 2]
    assert [found.next_at(position) for position in range(10)] == [2, 4, 5, 8, 6, 7, 9, 10, 13, 11]
    assert found.pages == [0, 1, 0, 3, 1]


def test_parameters_are_there_as_long_as_their_unit_is_used():
    assert course("p0 a0 p1 g1 g1 p0 g0").leaves == [1, 0, 2, 0, 0, 1, 0]
    assert course("p0 P1 g0 S1 g0").leaves == [4, 2, 0, 0, 0], "each lane holds its own"


def test_what_comes_from_above_passes_through():
    supplied = [False] * 4
    assert course("p0 g0 P0 S0", supplied=supplied).leaves == [0, 0, 1, 0]


def test_pages_enter_as_early_as_they_fit_into_what_is_read_ahead():
    assert course("p0 p1 p2 p3").enters == [0, 0, 0, 0]
    assert course("p0 p1 p2 p3", Limits(ENDLESS, ahead=20)).enters == [1, 1, 1, 1], "what just fits is read"
    assert course("p0 p1 p2 p3", Limits(ENDLESS, ahead=20), sizes={"p1": 11}).enters == [1, 0, 0, 1]
    assert course("p0 p1 p2 p3", Limits(ENDLESS, ahead=ENDLESS)).enters == [3, 3, 3, 3], "no more than a step ahead"


def test_the_computation_is_ahead_of_an_update_that_lags():
    lead = Limits(ENDLESS, lead=20)
    assert course("p0 g0 S0 G0 p1 g1 S1 G1", lead).enters == [3, 1, 0, 0, 3, 1, 0, 0], "over what is updated between"
    assert course("p0 g0 p1 g1 S1 G1 S0 G0", lead).enters == [0] * 8, "the update comes behind all gradients"
    assert course("S0 G0 S1 G1 p0 g0 p1 g1", lead).enters == [0] * 8, "or before them"
    assert course("p0 g0 S0 G0 p1 g1 S1 G1", Limits(ENDLESS, ahead=40, lead=20)).enters == [3] * 8


def test_what_the_update_has_changed_stays_until_it_is_written():
    assert course("p0 g0 S0 G0 p1", Limits(ENDLESS, behind=20)).leaves == [1, 0, 0, 0, 0]
    assert course("p0 g0 S0 G0 S1 G1 S2", Limits(ENDLESS, behind=20)).leaves == [1, 0, 2, 0, 2, 0, 3]
    assert course("g0 P0 S0 G0", Limits(ENDLESS, behind=10)).leaves == [0, 2, 0, 0]


def test_what_ends_with_its_use():
    words = "p0 a0 t0 g0 a0 t0 P0 S0 G0"
    assert [word for word, ends in zip(words.split(), course(words).ends, strict=True) if ends] == [
        "t0",
        "a0",
        "t0",
        "G0",
    ]
    assert course("a0 a1 a1 a0").ends == [False, False, True, True]


def test_what_is_changed_and_what_may_go_unwritten():
    words = "p0 g0 P0 S0 G0"
    found = course(words, supplied=[False, False, True, False, False])
    assert [found.changes(position) for position in range(5)] == [False, True, True, True, False]
    assert found.lapses(0, changed=False), "it comes from above"
    assert not found.lapses(0, changed=True)
    assert not found.lapses(2, changed=False), "the computation reads it from below"
    assert [found.lapses(position, changed=True) for position in range(5)] == [False] * 4 + [True]
    assert course(words).supplied == [False] * 5
