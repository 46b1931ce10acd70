"""How large a unit of sharding should be.

Read `unit_size`; `unit_size_panel` is its widget.
"""
