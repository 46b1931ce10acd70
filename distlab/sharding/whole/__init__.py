"""Optimizers that look at whole tensors (Muon, LAMB, LARS), on shards: who sees a whole tensor, and who computes.

Begin with `plain`, both answers by hand: everyone gathers and computes all, or each matrix has an owner. Then
`optimizer` (`WholeTensorOptimizer`).
"""
