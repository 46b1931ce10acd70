"""What fills a device's memory, and how large a unit of sharding should be.

Read `memory`, then `compare` (several plans, or measured over predicted) and `unit_size`.
"""
