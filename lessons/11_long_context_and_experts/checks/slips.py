"""More wrong versions of this lesson's functions: slips that are none of those in the other files."""

from distlab.grading import Mutant

WRONG_REPAIR = (
    Mutant("shared not divided", "sum not mean", "the sum over ranks, not the mean", 2).edit(
        "dist.all_reduce(parameter.grad)\nparameter.grad /= n", "dist.all_reduce(parameter.grad)"
    ),
)

KNOWN_MERGE = (
    Mutant("base 2", "values", "powers of 2", 1)
    .edit("torch.logaddexp(", "torch.logaddexp2(")
    .known("adds up powers of 2 (logaddexp2); log_sum is of exp"),
    Mutant("larger alone", "values", "larger log_sum alone", 1)
    .edit(
        "share, new_share = (log_sum - total).exp(), (new_log_sum - total).exp()",
        "share, new_share = (log_sum >= new_log_sum).to(mean.dtype), (log_sum < new_log_sum).to(mean.dtype)",
    )
    .known("takes the mean with the larger log_sum alone"),
)

KNOWN_RING = (
    Mutant("zeros for hidden keys", "values", "a score like any other", 1)
    .edit("theirs, -torch.inf)", "theirs, 0.0)")
    .known("masks with 0, which is a score like any other; -inf has no weight"),
    Mutant("keys for queries", "values", "keys with keys", 1)
    .edit("scores = query @", "scores = key @")
    .known("scores keys with keys, not queries with keys"),
)

KNOWN_ROUTE = (
    Mutant("later token first", "values", "later token", 1)
    .edit("asked.cumsum(dim=0)", "asked.flip(0).cumsum(dim=0).flip(0)")
    .known("lets the later token come first; among equals the earlier one does"),
    Mutant("second choices first", "values", "second choices before", 1)
    .edit("experts.T.reshape(-1)", "experts.T.flip(0).reshape(-1)")
    .edit("kept = (place <= capacity).view(top_k, -1).T", "kept = (place <= capacity).view(top_k, -1).flip(0).T")
    .known("serves second choices before first ones"),
)

KNOWN_ASK = (
    Mutant("residual", "values", "adds the tokens", 1)
    .edit("return weights", "return tokens + weights")
    .known("adds the tokens to the answers; the layer around it may do that"),
    Mutant("weights squared", "values", "counts weights twice", 1)
    .edit("weights[:, None] *", "weights[:, None] ** 2 *")
    .known("counts weights twice"),
    Mutant("weights sorted", "values", "order in which tokens left", 2)
    .edit("weights[:, None] *", "weights[order][:, None] *")
    .known("has the weights in the order in which tokens left, and the answers in that of the tokens"),
    Mutant("no expert", "values", "never asks the expert", 1)
    .edit("exchange_rows(expert(arrived),", "exchange_rows(arrived + 0 * expert(arrived),")
    .known("sends tokens there and back and never asks the expert"),
)

KNOWN_BALANCE = (
    Mutant("choices alone", "values", "counts of choices", 1)
    .edit("probabilities.mean(dim=0)", "fraction")
    .known("multiplies the counts of choices by themselves, not by the probabilities"),
    Mutant("largest probability", "values", "largest probability", 1)
    .edit("probabilities.mean(dim=0)", "probabilities.amax(dim=0)")
    .known("takes each expert's largest probability, not the mean over tokens"),
)
