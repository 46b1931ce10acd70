"""Simulate again and again with one thing changed, and find the best value.

Read `compression`, then `fsdp_units` and `axis_order`.
"""
