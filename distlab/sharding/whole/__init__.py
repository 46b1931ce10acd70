"""Optimizers that look at whole tensors (Muon, LAMB, LARS), on shards: who sees a whole tensor, and who computes.

Begin with `plain`, both answers by hand: everyone gathers and computes all, or each matrix has an owner. Then `held`
(what ranks hold of a sharded model), `exchange` (buckets of pieces, to owners and back), `optimizer`
(`WholeTensorOptimizer`).
"""
