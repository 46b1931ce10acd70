"""Ranks on the axes of a mesh, and what each axis costs.

Read `mesh`, then `step_parts`, `axis_order` and `degrees`; `degrees_panel` is a widget.
"""
