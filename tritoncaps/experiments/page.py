"""Writes report.html: the figures, the table and the notes of an experiment, on one page without external resources."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from tritoncaps.version import __version__

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --dim: #667085; --paper: #fbfbf9; --card: #fff; --line: #e3e5e8;
        --accent: #2563b8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --dim: #98a1b0; --paper: #14171c; --card: #1c2027; --line: #2e343d; --accent: #7fb0f5; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.5rem 1.25rem 4rem; max-width: 62rem; background: var(--paper); color: var(--ink);
       font: 16px/1.55 system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .35rem; letter-spacing: -.01em; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .7rem; }
.from { color: var(--dim); margin: 0 0 1.6rem; }
.numbers { display: flex; flex-wrap: wrap; gap: .75rem; margin: 0 0 1.6rem; padding: 0; list-style: none; }
.numbers li { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: .6rem .9rem; }
.numbers b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
.numbers span { color: var(--dim); font-size: .85rem; }
figure { margin: 0 0 1.6rem; padding: 1rem; background: var(--card); border: 1px solid var(--line);
         border-radius: 12px; }
figure img { display: block; max-width: 100%; height: auto; margin: 0 auto; border-radius: 6px; background: #fff; }
figcaption { margin-top: .8rem; color: var(--dim); font-size: .92rem; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .8rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { color: var(--dim); font-weight: 600; }
th.text, td.text { text-align: left; }
code { font: .88em ui-monospace, Menlo, Consolas, monospace; }
"""

PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def page(report: Mapping[str, Any]) -> str:
    """``report``: the fields of :class:`~tritoncaps.experiments.Report`."""
    title = escape(report["title"])
    given = " ".join(_flag(name, value) for name, value in report["options"].items() if value not in (False, 0))
    command = escape(f"tritoncaps experiment {report['name']} {given}".strip())
    parts = [
        f"<h1>{title}</h1>",
        f'<p class="from">{escape(report["paper"])}<br><code>{command}</code>, tritoncaps {__version__}</p>',
        _numbers(report["numbers"]),
        *(_figure(**figure) for figure in report["figures"]),
        *(f"<p>{escape(note)}</p>" for note in report["notes"]),
        "<h2>Table</h2>" if report["rows"] else "",
        _table(report["rows"]),
    ]
    body = "\n".join(part for part in parts if part)
    return PAGE.format(title=title, style=STYLE, body=body)


def _flag(name: str, value: Any) -> str:
    flag = "--" + name.replace("_", "-")
    return flag if value is True else f"{flag} {value}"


def _numbers(numbers: Mapping[str, Any]) -> str:
    """The list of the single values."""
    shown = {name: value for name, value in numbers.items() if not isinstance(value, (dict, list))}
    items = (
        f"<li><b>{_text(name, value)}</b><span>{escape(_words(name))}</span></li>" for name, value in shown.items()
    )
    return f'<ul class="numbers">{"".join(items)}</ul>' if shown else ""


def _figure(file: str, caption: str) -> str:
    return (
        f'<figure><img src="{escape(file)}" alt="{escape(caption)}"><figcaption>{escape(caption)}</figcaption></figure>'
    )


def _table(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    kinds = {key: ' class="text"' * any(isinstance(row.get(key), str) for row in rows) for key in columns}
    head = "".join(f"<th{kinds[key]}>{escape(_words(key))}</th>" for key in columns)
    lines = (
        "<tr>" + "".join(f"<td{kinds[key]}>{_text(key, row.get(key))}</td>" for key in columns) + "</tr>"
        for row in rows
    )
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _text(name: str, value: Any) -> str:
    """A value as text; fractions are shown in per cent."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.1%}" if is_share(name) else f"{value:.4g}"
    return escape(str(value))


def is_share(name: str) -> bool:
    """True if the name is that of a fraction of images or pixels."""
    return "squared" not in name and any(word in name for word in ("accuracy", "error", "share", "success"))


def _words(name: str) -> str:
    return name.replace("_", " ")
