"""What a rank really holds, by kind and over time.

Read `measured` (what one calls, and how kinds become known), then `storages` (every storage, while it is there).
"""
