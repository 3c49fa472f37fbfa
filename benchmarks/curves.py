"""Curves as an SVG picture, which needs no plotting library and shows in a browser.

Owns the drawing of a few lines over one pair of axes. Does not know what they mean. Guarantees a file that depends on
the numbers alone, so that a result can be drawn again from its JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 60, 20, 30, 45
COLOURS = ("#1f5fa8", "#d1495b", "#3a7d44", "#8a5a00")
TICKS = 6
FONT = 'font-family="sans-serif" font-size="12"'


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and the ones before it, `window` in all (fewer at the beginning)."""
    means = []
    for end in range(1, len(values) + 1):
        last = values[max(0, end - window) : end]
        means.append(sum(last) / len(last))
    return means


def draw(curves: Mapping[str, Sequence[float]], *, title: str) -> str:
    """Return an SVG of the curves: the loss of step k + 1 is value number k."""
    longest = max(map(len, curves.values()))
    low, high = (pick(value for values in curves.values() for value in values) for pick in (min, max))
    high = high if high > low else low + 1.0

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / longest

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" {FONT}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="18" text-anchor="middle">{escape(title)}</text>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">step</text>',
        f'<text transform="translate(14 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">loss</text>',
    ]
    for tick in range(TICKS + 1):
        value, step = low + (high - low) * tick / TICKS, longest * tick / TICKS
        parts += [
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#e4e4e4"/>',
            f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.2f}</text>',
            f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{step:.0f}</text>',
        ]
    for number, (name, values) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(f"{x(step + 1):.1f},{y(value):.1f}" for step, value in enumerate(values))
        line = TOP + 14 + 18 * number
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5" stroke-opacity="0.85"/>',
            f'<text x="{WIDTH - RIGHT - 8}" y="{line}" text-anchor="end" fill="{colour}">{escape(name)}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])
