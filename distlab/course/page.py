"""A page of HTML, to read in a browser and to print; it loads nothing from elsewhere."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from urllib.parse import quote

STYLE = (
    "body{font-family:system-ui,sans-serif;margin:2em auto;max-width:60em;padding:0 1em;background:white;color:black}"
    "table{border-collapse:collapse;width:100%}th,td{padding:.25em .7em;text-align:left;vertical-align:top;"
    "white-space:pre-wrap;border-bottom:1px solid #8888}h2{font-size:1.1em;margin:1.6em 0 .3em}"
    "section{break-inside:avoid}@media print{body{margin:0;max-width:none;font-size:9pt}@page{margin:15mm}}"
)


def page(
    title: str,
    lines: Sequence[str],
    *tables: tuple[str, Sequence[Sequence[object]]],
    links: Mapping[str, str] | None = None,
) -> str:
    """Write a title, lines, and tables: each has a name, or "", and rows, of which the first are the columns' heads.

    `links` says where the words of a cell lead, such as a name to a page.
    """

    def said(cell: object) -> str:
        text, address = html.escape(str(cell)), (links or {}).get(str(cell))
        return f'<a href="{quote(address)}">{text}</a>' if address else text

    name = html.escape(title)
    body = "".join(f"<p>{html.escape(line)}</p>" for line in lines)
    for head, rows in tables:
        shown = ["\n".join(f'<th scope="col">{html.escape(str(cell))}</th>' for cell in rows[0])]
        shown += ["\n".join(f"<td>{said(cell)}</td>" for cell in row) for row in rows[1:]]
        table = f"<table>{''.join(f'<tr>{row}</tr>' for row in shown)}</table>"
        body += f"<section>{f'<h2>{html.escape(head)}</h2>' if head else ''}{table}</section>"
    meta = f'<meta charset="utf-8"><title>{name}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{meta}</head><body><h1>{name}</h1>{body}</body></html>\n'
