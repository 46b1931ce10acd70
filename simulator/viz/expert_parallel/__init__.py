"""Where tokens go among experts.

Read `routes` (what is counted), then `routing`.
"""
