"""This machine: how fast it is, what it is, and ratios measured on it.

Read `speed` (calibrate), `saved` (keep the result), `facts` (processor, versions), `ratio` (benchmark rows), `ranks`
(devices, clocks, and numbers that are the same on every rank).
"""
