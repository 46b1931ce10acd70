"""Formulas as MathML, which browsers and screen readers read by themselves: no script, nothing to load."""

from __future__ import annotations

import re

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

FRACTION = re.compile(r"\\frac(\d)(\d)")  # TeX takes two digits without braces


def _mathml(node: nodes.math | nodes.math_block, *, block: bool = False) -> str:
    return tex2mathml(FRACTION.sub(r"\\frac{\1}{\2}", node.astext()), as_block=block)


def _inline(writer: HTML5Translator, node: nodes.math) -> None:
    writer.body.append(_mathml(node))
    raise nodes.SkipNode


def _block(writer: HTML5Translator, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="formula">{_mathml(node, block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer under the name "mathml"."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
