"""How every picture looks and is drawn.

Read `style` (colours, letters), then `words`, `plot` (figures, axes, scales) and `pen` (boxes, arrows,
legends). `bars` draws numbers, `boxes` spans of time in the rows of `lanes`. `picture` is what a notebook gets, and
`paint` renders quickly what a slider moves.
"""
