"""The state of a sharded model and its optimizer, in shards or whole: one format for all plans.

Read `parts` (what a rank keeps, saved, joined and whole), then `of_model` (what programs call).
"""
