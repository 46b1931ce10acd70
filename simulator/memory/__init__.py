"""Bytes on each rank: by kind, at the peak and over a step.

Read `memory` (`memory_of`, and what is alive while passes run), then `stage` (what one stage holds) and `model_states`
(parameters, gradients, optimizer, gathered units). `advice` finds the smallest change that makes a plan fit.
"""
