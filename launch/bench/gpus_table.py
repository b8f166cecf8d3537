"""What was found between several GPUs, in the units in which it is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from crossdock.launch.bench.peers import NVLINK_GB_S

__all__ = ["figures_of", "table_of"]


def figures_of(
    cases: Sequence[dict[str, Any]], *, prefill: int, decode: int
) -> dict[str, dict[str, Any]]:
    """The figures that have a target, of the cases that were measured.

    Args:
        cases: As ``bench_gpus`` returns them.
        prefill: Tokens a rank at which bandwidth is judged.
        decode: Tokens a rank at which latency is judged.

    Returns:
        By what it is: ``value`` and ``asked``.
    """
    figures: dict[str, dict[str, Any]] = {}

    def add(name: str, value: float | None, asked: str) -> None:
        if value is not None:
            figures[name] = {"value": value, "asked": asked}

    for case in cases:
        at = f"{case['tokens']} tokens, {case['routing']}"
        if case["num_sms"] is not None or case["wire"] != "payload":
            continue
        us = case["us"]
        if case["tokens"] == prefill:
            for name in us:
                if name.endswith(" dispatch"):
                    ratio = _ratio(us, "peer copy", name)
                    asked = "at least 0.85" if name.startswith("captured") else ""
                    add(f"{name}, {at}: of peer copy", ratio, asked)
                    ratio = _ratio(us, _first(us, "naive"), name)
                    add(f"naive / {name}, {at}", ratio, "at least 2")
        if case["tokens"] == decode:
            both = _first(us, "captured", "dispatch + combine")
            add(f"{both}, {at}: us", us.get(both), "below 100 with 8 GPUs")
    return figures


def table_of(result: dict[str, Any]) -> str:
    """Everything as tables in Markdown."""
    link = result["link"]
    share = ", which share one GPU: its memory is the link" if result["ranks share a GPU"] else ""
    lines = [
        f"{result['world_size']} ranks on {result['device']}{share}; H = {result['hidden']}, "
        f"top-{result['top_k']}, bf16; slowest rank, median of {result['rounds']} rounds.",
        "",
        *_table(
            ("figure", "", "asked"),
            ((n, f"{f['value']:.2f}", f["asked"]) for n, f in result["figures"].items()),
        ),
        "",
        f"Link: {link['GB/s, one direction']:g} GB/s each way ({link['source']}). GB/s are of the "
        "payload that crosses, in the busiest direction of the busiest rank.",
        "",
    ]
    names = list(dict.fromkeys(name for case in result["cases"] for name in case["us"]))
    shown = [name for name in names if name == "peer copy" or not name.startswith("peer copy")]
    rates = ("dispatch, GB/s", "of link", "of peer copy", "combine, GB/s", "of link")
    header = ("case", *(f"{name}, us" for name in shown), *rates)
    lines += _table(header, (_row(case, shown) for case in result["cases"]))
    for title in ("missing", "left out, no time"):
        if result[title]:
            lines += ["", f"{title}: {result[title]}"]
    return "\n".join(lines) + "\n"


def _row(case: dict[str, Any], shown: Sequence[str]) -> list[str]:
    us = case["us"]
    sms = "" if case["num_sms"] is None else f", {case['num_sms']} SMs"
    row = [f"{case['routing']}, {case['wire']}, {case['tokens']} tokens{sms}"]
    row += [f"{us[name]:.1f}" if name in us else "" for name in shown]
    for half in ("dispatch", "combine"):
        name = _first(us, "captured", f" {half}") or _first(us, "eager", f" {half}")
        rate = case["bytes that cross"][half] / us[name] / 1e3
        row += [f"{rate:.1f}", f"{rate / NVLINK_GB_S:.2f}"]
        if half == "dispatch":
            ratio = _ratio(us, "peer copy", name)
            row.append("" if ratio is None else f"{ratio:.2f}")
    return row


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _first(us: dict[str, float], begin: str, end: str = "") -> str:
    return next((name for name in us if name.startswith(begin) and name.endswith(end)), "")


def _ratio(us: dict[str, float], over: str, under: str) -> float | None:
    return us[over] / us[under] if over in us and under in us else None
