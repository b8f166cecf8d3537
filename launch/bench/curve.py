"""Draws what ``crossdock.launch.bench.onesided`` measured: GB/s against tokens of a rank.

``python -m crossdock.launch.bench.curve RESULT.json PICTURE.svg``
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

__all__ = ["curve_svg"]

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 640, 400, 60, 50, 30, 20
_LINES = (("ceiling", "#999999"), ("dispatch", "#1f6fb4"))


def curve_svg(result: dict[str, Any]) -> str:
    """An SVG with a line for dispatch and one for its ceiling, in the same run."""
    cases = [*result["curve"].values(), *result["uniform"].values()]
    points = sorted(
        (case["tokens"], case["GB/s of all ranks, read and written"])
        for case in cases
        if case["wire"] == "payload"
    )
    least, most = math.log2(points[0][0]), math.log2(points[-1][0])
    top = float(max(max(rates.values()) for _, rates in points)) * 1.1

    def x_of(tokens: int) -> float:
        share = (math.log2(tokens) - least) / (most - least)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y_of(rate: float) -> float:
        return _HEIGHT - _BOTTOM - rate / top * (_HEIGHT - _BOTTOM - _TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="18">GB/s, read and written, {result["world_size"]} ranks on one '
        f"{result['device']}, bf16, H={result['hidden']}, top-{result['top_k']}</text>",
    ]
    for rate in range(0, int(top), 500):
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y_of(rate):.1f}" '
            f'y2="{y_of(rate):.1f}" stroke="#dddddd"/>'
            f'<text x="{_LEFT - 6}" y="{y_of(rate) + 4:.1f}" text-anchor="end">{rate}</text>'
        )
    for tokens, _ in points:
        parts.append(
            f'<text x="{x_of(tokens):.1f}" y="{_HEIGHT - _BOTTOM + 18}" '
            f'text-anchor="middle">{tokens}</text>'
        )
    parts.append(
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 12}" text-anchor="middle">tokens of a rank</text>'
    )
    for row, (name, colour) in enumerate(_LINES):
        path = " ".join(f"{x_of(t):.1f},{y_of(rates[name]):.1f}" for t, rates in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(
            f'<text x="{_LEFT + 12}" y="{_TOP + 20 + 16 * row}" fill="{colour}">{name}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Draw a result."""
    source, target = map(Path, sys.argv[1:])
    target.write_text(curve_svg(json.loads(source.read_text())))


if __name__ == "__main__":
    main()
