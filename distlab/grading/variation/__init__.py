"""A matrix of variation: call an answer with drawn arguments, call the reference with the same, compare everything.

Read in this order: `draw` (seeded arguments, and `Vary`, which an exercise declares), `owned` (what belongs to the
caller), `calls` (runs on every rank), `left` (hooks and attributes that stay behind), `verdict` (compares and names the
fault), `axes` (what the draws cover).
"""
