"""Gradients that travel during backward, for all techniques that average or scatter them.

Read `flat_gradients` (buckets that leave in one order on all ranks) and `gradient_status` (what became of each
gradient, and how all ranks hear of it).
"""
