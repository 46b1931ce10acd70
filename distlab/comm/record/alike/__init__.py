"""Calls that are alike, so that no fingerprint tells them apart, and that do not fit.

Read `swapped` (made in another order) and `splits` (an all_to_all that gives other amounts than are taken).
"""
