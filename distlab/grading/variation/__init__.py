"""A matrix of variation: call an answer with drawn arguments, call the reference with the same, compare everything.

Read in this order: `draw` (seeded arguments, and `Vary`, which an exercise declares), `owned` (what belongs to the
caller), `calls` (runs on every rank), `left` (hooks and attributes that stay behind), `near` (are two equal), `verdict`
(names the fault), `as_if` (finds what wrong results are right for, among `changes` of the reference), `axes` (what the
draws cover).
"""
