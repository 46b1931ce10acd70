"""How every picture looks and is drawn.

Read `style` (colours, letters), then `words`, `plot` (figures, axes, scales) and `pen` (boxes, arrows,
legends). `bars` draws numbers, `boxes` spans of time in the rows of `lanes`. `paint` renders quickly, and light on
dark; `mimebundle` is for notebooks.
"""
