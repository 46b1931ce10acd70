"""How every picture looks and is drawn.

Read `style` (colours, letters, units), then `boxes` (spans of time) and `lanes` (the row of each). `pen`, `letters`,
`legend`, `shades`, `light_axes` and `paint` draw quickly; `panel` is the base of every widget with controls.
"""
