"""How every picture looks and is drawn.

Read `theme` (colours, letters), then `plot` (figures, words, axes, scales) and `pen` (boxes, arrows, legends, and the
Picture that a notebook gets). `bars` draws numbers and sections of a step, `lanes` spans of time in rows, and `paint`
renders quickly what a slider moves.
"""
