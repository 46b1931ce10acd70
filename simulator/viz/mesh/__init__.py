"""Ranks on the axes of a mesh, and what each axis costs.

Read `mesh`, then `degrees` (what a step's time goes into, also over time and with the price of a run), and
`axis_order`.
"""
