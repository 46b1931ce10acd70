"""One module for each subject, with `findings(job)`; `gpu.job.PARTS` has their order and their seconds.

`machine` comes first: rates, against the data sheet. Then what must be true: `plans`, `equality`, `streams`. Then
speed: `model`, `data_parallel`, `sharding`, `optimizer`, `recompute`, `pipeline`, `tensor_parallel`. Then the
simulator: `calibrate`, `predicted`, `memory`. Last the `course`: the tour and each lab.
"""
