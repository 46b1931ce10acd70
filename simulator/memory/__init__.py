"""Bytes on each rank: by kind, at the peak and over a step.

Read `memory` (`memory_of`), then `stage` (what one stage holds), `model_states` (parameters, gradients, optimizer,
gathered units) and `over_time` (what is alive while passes run). `advice` finds the smallest change that makes a plan
fit.
"""
