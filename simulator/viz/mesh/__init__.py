"""Ranks on the axes of a mesh, and what each axis costs.

Read `mesh`, then `step_parts` (what a step's time goes into), `axis_order`, `degrees` and
`planner` (degrees with a step over time and the price of a run).
"""
