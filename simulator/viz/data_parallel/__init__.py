"""A data-parallel step at every moment: `step` reads it from a trace, `train_step` draws it."""
