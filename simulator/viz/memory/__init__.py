"""What fills a device's memory.

Read `memory`, then `compare` (several plans, or measured over predicted); `memory_panel` is their widget.
"""
