"""When compression pays.

Read `compression`; `compression_panel` is its widget.
"""
