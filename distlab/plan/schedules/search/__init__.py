"""Automatic zero bubble: search for the schedule that fits given times and a limit of memory.

Read `automatic`, then `rules` (one pass of rules).
"""
