"""Attention over tensor ranks: its heads are split.

Read `heads`; `grouped` is for models with fewer heads of keys and values than ranks.
"""
