"""Ring attention over a causal mask, hop by hop.

Read `context_work` (what is counted), then `context`.
"""
