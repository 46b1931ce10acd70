"""A page of HTML, to read in a browser and to print; it loads nothing from elsewhere."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

STYLE = Path(__file__).with_suffix(".css").read_text(encoding="utf-8").replace("\n", "")


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
