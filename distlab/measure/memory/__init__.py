"""Measured memory: what a rank really holds, by kind and over time.

Read `measured`, then `storages` (every storage's life) and `hooks` (what each storage is for).
"""
