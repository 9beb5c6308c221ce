"""Output of the rows: tables, files, figures, comparisons, and the page of the documentation."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from harness import CNN, COMPILED, CONV, FLOOR, OURS, REFERENCE, SHORT, Row

from tritoncaps.data.files import write_atomically

NO_TIME = "no time"


def key(row: Row) -> tuple:
    return tuple(row.get(name) for name in ("subject", "case", "mode", "provider"))


# files


def read(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def write(rows: list[Row], file: Path) -> None:
    """Write one JSON object in each line, the header first, and a CSV file without the header."""
    save(file, lines_of(rows))
    columns = list(dict.fromkeys(name for row in rows[1:] for name in row if name != "times_ms"))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows[1:])
    save(file.with_suffix(".csv"), text.getvalue())


def lines_of(rows: list[Row]) -> str:
    """One JSON object in each line."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def save(file: Path, text: str) -> None:
    write_atomically(file, lambda out: out.write(text.encode()))


# tables


def heading(header: Row) -> str:
    is_busy = (header["load"] or 0) > 0.5 * header["cpus"]
    busy = "; THE MACHINE WAS BUSY, do not trust these times" if is_busy else ""
    clock = f" at {header['clock_mhz']:.0f} MHz" if header["clock_mhz"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    return (
        f"device: {header['device']} ({header['name']}{clock}), {header['threads']} threads of {header['cpus']} CPUs, "
        f"load {header['load']}, {header['dtype']}, {header['system']}\n"
        f"tritoncaps {header['tritoncaps']}, commit {header['commit']}; Python {header['python']}, {versions}\n"
        f"{header['level']} run of {header['date']}{busy}"
    )


def _time(row: Row) -> str:
    if row.get("failed"):
        return NO_TIME
    if "p20_ms" not in row:
        return f"{row['p50_ms']:.4g}" if "p50_ms" in row else ""
    return f"{row['p50_ms']:.4g} ({row['p20_ms']:.4g} to {row['p80_ms']:.4g})"


def _ratio(row: Row) -> str:
    if "times_ours" not in row:
        return ""
    return f"{row['times_ours']:.3g} ({row['times_ours_p20']:.3g} to {row['times_ours_p80']:.3g})"


def _number(name: str, form: str) -> Callable[[Row], str]:
    return lambda row: format(row[name], form) if row.get(name) is not None else ""


COLUMNS: dict[str, Callable[[Row], str]] = {
    "case": lambda row: row["case"],
    "images": _number("images", "d"),
    "provider": lambda row: row["provider"],
    "pass": lambda row: row["mode"],
    "ms: p50 (p20 to p80)": _time,
    "least ms": _number("least_ms", ".3f"),
    "times ours": _ratio,
    "images/s": _number("images_per_s", ".4g"),
    "GFLOP/s": _number("gflops", ".3g"),
    "of sgemm": _number("of_sgemm", ".0%"),
    "GB/s": _number("gbs", ".3g"),
    "of copy": _number("of_copy", ".0%"),
    "of memset": _number("of_memset", ".0%"),
    "ns/vote": _number("ns_per_vote", ".3g"),
    "kept MiB/image": _number("kept_mib", ".3g"),
    "peak MiB/image": _number("peak_mib", ".3g"),
    "traffic MiB": _number("traffic_mib", ".3g"),
    "error": _number("error", ".0e"),
}


def cells(rows: list[Row], columns: dict[str, Callable[[Row], str]] = COLUMNS) -> list[list[str]]:
    """Titles and rows, without empty columns."""
    found = {title: [cell(row) for row in rows] for title, cell in columns.items()}
    used = {title: values for title, values in found.items() if any(values)}
    return [list(used), *(list(line) for line in zip(*used.values(), strict=True))]


def table(rows: list[Row]) -> str:
    failures = "".join(f"\n{NO_TIME}: {row['provider']}, {row['mode']}: {row['failed']}" for row in failed(rows))
    return aligned(cells(rows)) + failures


def aligned(lines: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (zip(line, widths, strict=True) for line in lines)
    return "\n".join("  ".join(cell.ljust(width) for cell, width in line).rstrip() for line in padded)


def failed(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.get("failed")]


def markdown(rows: list[Row]) -> str:
    titles, *lines = cells(rows)
    ruled = [titles, ["---"] * len(titles), *lines]
    text = "\n".join("| " + " | ".join(line) + " |" for line in ruled)
    failures = "".join(f"\n\n{NO_TIME}: {row['provider']}, {row['mode']}: {row['failed']}." for row in failed(rows))
    return text + failures


# verdicts


def comparison(before: list[Row], after: list[Row]) -> str:
    """Compare two runs case by case. A difference counts if the intervals from p20 to p80 do not overlap."""
    old = {key(row): row for row in before[1:]}
    lines = [["subject", "case", "pass", "provider", "before ms", "after ms", "after/before", "verdict"]]
    for row in after[1:]:
        other = old.get(key(row))
        if other and "p20_ms" in row and "p20_ms" in other:
            ratio = row["p50_ms"] / other["p50_ms"]
            numbers = [f"{other['p50_ms']:.4g}", f"{row['p50_ms']:.4g}", f"{ratio:.2f}"]
            lines.append([*map(str, (*key(row)[:3], row["provider"])), *numbers, verdict(other, row)])
    return "\n".join([f"before:\n{heading(before[0])}", f"after:\n{heading(after[0])}", "", aligned(lines)])


def verdict(before: Row, after: Row) -> str:
    if after["p80_ms"] < before["p20_ms"]:
        return "faster"
    if after["p20_ms"] > before["p80_ms"]:
        return "slower"
    return "no difference seen"


# figures

COLOURS = {OURS: "#0b6e4f", REFERENCE: "#b9c0c7", COMPILED: "#6c7a89", CONV: "#e08e45", CNN: "#f2c48d"}
INK, PALE = "#22272b", "#e4e7ea"
SPEED = {"em_routing": "EM routing", "dynamic_routing": "Dynamic routing", "layers": "Layer", "models": "Model"}
STYLE = {
    "font.size": 11,
    "axes.edgecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": PALE,
}


def figures(rows: list[Row], folder: Path) -> list[Path]:
    """Draw the figures that have rows."""
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, (draw, wanted) in {
        "speed": (_draw_speed, [r for r in rows if r.get("subject") in SPEED and _is_timed_step(r)]),
        "memory": (_draw_memory, [r for r in rows if r.get("subject") == "memory"]),
        "scaling": (_draw_scaling, [r for r in rows if r.get("group") and "p20_ms" in r]),
    }.items():
        if wanted:
            file = folder / f"{name}.png"
            with matplotlib.rc_context(STYLE):
                figure = draw(wanted)
                figure.text(0.01, 0.01, _machine(rows[0]), fontsize=8, color="#6c7a89", va="bottom")
                write_atomically(file, partial(figure.savefig, dpi=150))
            matplotlib.pyplot.close(figure)
            drawn.append(file)
    return drawn


def _is_timed_step(row: Row) -> bool:
    return row["mode"] == "step" and "p20_ms" in row


def _machine(header: Row) -> str:
    return f"{header['name']}, {header['threads']} threads, {header['dtype']}, tritoncaps {header['commit']}"


def _draw_speed(rows: list[Row]) -> Any:
    return _bars(rows, "p50_ms", "Time of a forward and a backward pass", "ms (bars: median, lines: p20 to p80)")


def _draw_memory(rows: list[Row]) -> Any:
    return _bars(rows, "kept_mib", "Memory kept for the backward pass", "MiB for each image")


def _bars(rows: list[Row], value: str, title: str, label: str) -> Any:
    """A group of horizontal bars for each case, with a bar for each provider, on a logarithmic axis. Each bar has its
    number and its ratio to ours."""
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys((r["subject"], r["case"]) for r in rows))
    providers = [p for p in COLOURS if any(r["provider"] == p for r in rows)]
    figure, axes = plt.subplots(figsize=(10, 1.5 + 0.23 * (len(rows) + len(names))), layout="constrained")
    place, ticks = 0.0, []
    for subject, case in names:
        group = {r["provider"]: r for p in providers for r in rows if _is(r, subject, case, p)}
        ticks.append((place + (len(group) - 1) / 2, f"{SPEED[subject]}\n{case}" if subject in SPEED else case))
        for provider, row in group.items():
            x, high = row[value], row.get("p80_ms", row[value])
            spread = [[x - row["p20_ms"]], [high - x]] if "p20_ms" in row else None
            axes.barh(place, x, xerr=spread, color=COLOURS[provider], ecolor=INK, height=0.86)
            is_ours = provider == OURS
            times = "" if is_ours or OURS not in group else f"   {_short(_times_ours(row, group[OURS], value))}x"
            text = f"{_short(x)}{times}"
            weight = "bold" if is_ours else "normal"
            offset = {"xytext": (5, 0), "textcoords": "offset points"}
            axes.annotate(text, (high, place), va="center", fontsize=9, color=INK, weight=weight, **offset)
            place += 1
        place += 1
    axes.set_yticks([t for t, _ in ticks], [n for _, n in ticks])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.margins(x=0.15, y=0.01)
    axes.set(xscale="log", xlabel=label)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(axis="x")
    figure.suptitle(title, fontsize=15, weight="bold", color=INK)
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[p]) for p in providers]
    places = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "ncols": len(providers)}
    axes.legend(handles, providers, frameon=False, fontsize=10, **places)
    figure.supxlabel(" ", fontsize=8)  # room for the machine
    return figure


def _short(x: float) -> str:
    """A number with two or three digits, without an exponent."""
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}" if x >= 10 else f"{x:.2g}"


def _times_ours(row: Row, own: Row, value: str) -> float:
    """The ratio to ours; for times, computed in each round, as in the tables."""
    return row["times_ours"] if value == "p50_ms" else row[value] / own[value]


def _is(row: Row, subject: str, case: str, provider: str) -> bool:
    return (row["subject"], row["case"], row["provider"]) == (subject, case, provider)


def _draw_scaling(rows: list[Row]) -> Any:
    import matplotlib.pyplot as plt

    groups = list(dict.fromkeys(r["group"] for r in rows))
    columns = min(3, len(groups))
    height = -(-len(groups) // columns)
    size = (3.4 * columns, 1 + 2.6 * height)
    figure, grid = plt.subplots(height, columns, figsize=size, squeeze=False, layout="constrained")
    for axes, group in zip(grid.flat, groups, strict=False):
        points = [r for r in rows if r["group"] == group]
        low, middle, high = (
            [r["ns_per_vote"] * r[name] / r["p50_ms"] for r in points] for name in ("p20_ms", "p50_ms", "p80_ms")
        )
        places = range(len(points))  # equal distances, independent of the numbers
        axes.fill_between(places, low, high, color=COLOURS[OURS], alpha=0.2, linewidth=0)
        axes.plot(places, middle, marker="o", linewidth=2, color=COLOURS[OURS])
        for place in places:
            _annotate_beside(axes, place, middle)
        axes.set_xticks(places, [f"{r['x']:g}" for r in points])
        axes.set(xlabel=group, ylim=(0, 1.25 * max(high)), xlim=(-0.6, len(points) - 0.4))
        axes.grid(axis="y")
    for axes in list(grid.flat)[len(groups) :]:
        axes.set_visible(False)
    figure.suptitle("A forward and a backward pass: nanoseconds per vote", fontsize=15, weight="bold", color=INK)
    figure.supxlabel(" ", fontsize=8)  # room for the machine
    return figure


def _annotate_beside(axes: Any, place: int, values: list[float]) -> None:
    """Write the number of a point beside it, away from the line."""
    before, after = values[max(place - 1, 0)], values[min(place + 1, len(values) - 1)]
    own = values[place]
    is_peak, is_valley = own > max(before, after), own < min(before, after)
    side = 0 if is_peak or is_valley else (after < before) - (after > before)  # 1: falling, -1: rising
    style = {
        "xytext": (6 * side, -7 if is_valley else 6),
        "textcoords": "offset points",
        "ha": {1: "left", 0: "center", -1: "right"}[side],
        "va": "top" if is_valley else "bottom",
        "bbox": {"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 0.5},
    }
    axes.annotate(_short(own), (place, own), fontsize=9, color=INK, **style)


# the page

TITLES = {
    "em_routing": "EM routing of one layer",
    "dynamic_routing": "Dynamic routing",
    "layers": "Whole layers",
    "models": "Whole models",
    "memory": "Memory",
    "scaling": "Scaling",
    "first_call": "The first call",
    "call_cost": "The fixed cost of a call",
    "pose_votes": "`pose_votes`",
    "coordinate_addition": "`coordinate_addition`",
    "m_step": "`m_step`",
    "e_step": "`e_step`",
}

NOTES = {
    "em_routing": "The forward pass is without gradients. `nn.Conv2d` has 8 channels for each type, and the same "
    "kernel, stride and image. So it has as many multiply-adds as computing all votes once. Routing computes the votes "
    "again in every iteration.",
    "dynamic_routing": "The memory traffic is counted, not measured: the bytes of all arrays that each Triton launch, "
    "or each operator of the eager reference, reads or writes.",
    "models": "A forward pass and a training step (with the loss, without the optimizer). `nn.Conv2d` is the same "
    "network with a convolution instead of each routed layer, with as many multiply-adds as the votes of the layer. "
    "The CNN baseline is the one of the paper for the same images.",
    "memory": "Kept: memory that autograd keeps for the backward pass, including inputs, without parameters. Peak: the "
    "increase of memory in a step of a new process.",
    "scaling": "A forward and a backward pass of our kernels. A flat line is ideal, with two exceptions: more "
    "iterations cost more for each vote, and more threads should divide the time.",
    "first_call": "Milliseconds of the first forward and backward pass in a new process. Kernels are compiled once and "
    "stored on disk.",
    "call_cost": "Milliseconds of a call with very small kernels, and of one image through a network: the smallest of "
    "many calls.",
    "pose_votes": "Functions on stored votes, for your own routings. GB/s counts each argument and result once. On a "
    "CPU, `coordinate_addition` calls the einops reference.",
}

METHOD = f"""\
In each round, a case calls all its providers in turn, so that a noisy machine affects all equally. "times ours" is the
time of a provider divided by our time, computed in each round. A call of less than {SHORT} s is made twice and the
second one counts, as in a loop. The roofs are upper limits, measured in the same rounds: a product of two square
matrices (sgemm) and a copy (a memset on a GPU). Every result is first compared with the reference in float64. Its error
may be twice that of plain torch in float32, plus {FLOOR} units in the last place. A provider with a larger error gets
no time. The error is the largest of all results and gradients, relative to the largest number in the tensor.

GFLOP/s count matrix products, convolutions and the operations that our kernels need for each vote. The einops reference
does different work, so it has no rate. A quick run compiles the reference only for the forward pass of EM routing."""


def write_page(rows: list[Row], page: Path) -> None:
    """Write the page, and its rows and figures in the folder with its name."""
    folder = page.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    write(rows, folder / "rows.json")
    drawn = figures(rows, folder)
    save(page, page_text(rows, [f"{folder.name}/{file.name}" for file in drawn]))


def page_text(rows: list[Row], drawn: list[str]) -> str:
    header, *measured = rows
    pictures = {Path(name).stem: name for name in drawn}
    parts = [
        "# Benchmarks",
        "`make bench` writes this page from the rows in [benchmarks/rows.json](benchmarks/rows.json).",
        "```text\n" + heading(header) + "\n```",
        METHOD,
    ]
    if "speed" in pictures:
        parts.append(f"![time of every provider]({pictures['speed']})")
    for subject, title in TITLES.items():
        chosen = [row for row in measured if row["subject"] == subject]
        if chosen:
            parts += [f"## {title}", *_section(subject, chosen, pictures)]
    return "\n\n".join(parts) + "\n"


def _section(subject: str, rows: list[Row], pictures: dict[str, str]) -> list[str]:
    parts = [NOTES[subject]] if subject in NOTES else []
    if subject in pictures:
        parts.append(f"![{TITLES[subject].lower()}]({pictures[subject]})")
    roofs = [_range(name, unit, rows) for name, unit in (("sgemm", "gflops"), ("copy", "gbs"), ("memset", "gbs"))]
    if any(roofs):
        parts.append(f"Roofs: {', '.join(filter(None, roofs))}.")
    timed, counted = ([r for r in rows if (r["mode"] == "traffic") == is_counted] for is_counted in (False, True))
    return parts + [markdown(group) for group in (timed, counted) if group]


def _range(name: str, unit: str, rows: list[Row]) -> str:
    """The smallest and the largest value of a roof, if it was measured."""
    found = [row[f"{name}_{unit}"] for row in rows if f"{name}_{unit}" in row]
    form, title = (".0f", "GFLOP/s") if unit == "gflops" else (".1f", "GB/s")
    return f"{name} {min(found):{form}} to {max(found):{form}} {title}" if found else ""
