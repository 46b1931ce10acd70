"""Wrong versions of lesson 8's exercises that only drawn arguments tell from right ones."""

from distlab.grading import Mutant

_CUT = 'if kind == "column":'
_SQUARE = "square = sum((gradient.square().sum() for gradient in split), torch.zeros((), dtype=torch.float64))"
_FIRST = "torch.manual_seed(0)\n"

WRONG_CUTS = (
    Mutant("four ranks at most", "shape", "expected shape", 1, "one size").edit(
        _CUT, f"num_ranks, rank = min(num_ranks, 4), min(rank, 3)\n{_CUT}"
    ),
    Mutant("float64 written down", "dtype", "take the dtype from the argument", 1, "one dtype").edit(
        _CUT, f"weight, bias = weight.double(), bias.double()\n{_CUT}"
    ),
)
WRONG_PAIRS = (
    Mutant("three dims", "raised", "not enough values", 1, "one shape").edit(
        "return x.view_as(x)", "samples, positions, features = x.shape\nreturn x.view_as(x)"
    ),
    Mutant("sum kept", "kept", "make a new tensor", 1, "one call", preamble="_kept = {}").edit(
        "total = x.clone()", "total = _kept.setdefault((x.shape, x.dtype), x.clone()).copy_(x)"
    ),
)
WRONG_MLPS = (
    Mutant("rows by view", "raised", "view size", 1, "one layout").edit(
        "copy_to_ranks(x)", "copy_to_ranks(x.view(-1, x.shape[-1])).view(x.shape)"
    ),
    Mutant("seeds the world", "state left behind", "torch's random state", 1, "state").edit(
        "return reduce", f"{_FIRST}return reduce"
    ),
)
WRONG_HEADS = (
    Mutant("rank 0's", "values", "for rank=0, whatever rank is", 1).edit("(num_ranks)[rank]", "(num_ranks)[0]"),
    Mutant("heads of two rows", "raised", "split", 1, "one size").edit(
        "len(weight) // (num_heads + 2 * num_shared)", "2"
    ),
    Mutant("seeds the world", "state left behind", "torch's random state", 1, "state").edit(
        "return torch.cat(", f"{_FIRST}return torch.cat("
    ),
    Mutant("float64 written down", "dtype", "take the dtype from the argument", 1, "one dtype").edit(
        "return torch.cat(", "sections = [section.double() for section in sections]\nreturn torch.cat("
    ),
)
WRONG_ENTROPIES = (
    Mutant("one largest for all", "underflow", "take the largest of each position", 1).edit(
        "amax(1)", "amax().repeat(len(logits))"
    ),
    Mutant("ten positions", "values", "the loss", 1, "one size").edit(").mean()", ").sum() / 10"),
    Mutant("seeds the world", "state left behind", "torch's random state", 1, "state").edit(
        "return (total.log()", f"{_FIRST}return (total.log()"
    ),
)
WRONG_SEQUENCES = (
    Mutant("a part as it lies", "raised", "contiguous", 2, "one layout").edit("part.contiguous()", "part"),
    Mutant("sum kept", "kept", "make a new tensor", 1, "one call", preamble="_kept = {}").edit(
        "return part", "return _kept.setdefault((part.shape, part.dtype), part).copy_(part)"
    ),
)
WRONG_DROPS = (
    Mutant("rows dropped", "rows dropped", "each number is dropped by itself", 1).edit(
        "torch.rand(x.shape,", "torch.rand(x.shape[:1] + (1,) * (x.dim() - 1),"
    ),
    Mutant("a quarter", "scale", "the share that is dropped", 1, "one set of arguments").edit(
        "own = ", "p = 0.25\nown = "
    ),
    Mutant("float64 written down", "dtype", "expected dtype", 1, "one dtype").edit(
        "kept.to(x.device)", "kept.double()"
    ),
)
WRONG_CLIPS = (
    Mutant("partial left out", "norm of other parts", "leaves out `partial`", 1).edit("[*whole, *partial])", "whole)"),
    Mutant("the largest rank's", "norm of other parts", "as MAX takes", 2).edit(
        "dist.all_reduce(square)", "dist.all_reduce(square, dist.ReduceOp.MAX)"
    ),
    Mutant("zero gradients", "nan", "0 divided by 0", 1, "zero gradients").edit(
        "gradient *= factor", "gradient.copy_(gradient / norm * norm.clamp(max=max_norm))"
    ),
    Mutant("a part at least", "raised", "non-empty TensorList", 1, "empty lists").edit(
        _SQUARE, "square = torch.stack([gradient.square().sum().double() for gradient in split]).sum()"
    ),
    Mutant("clip_grad_norm_", "gradients of gradients", "no .grad", 1, "tensors for parameters").body(
        "return torch.nn.utils.clip_grad_norm_([*split, *whole, *partial], max_norm)"
    ),
)
WRONG_EMBEDDINGS = (
    Mutant("rows as they lie", "raised", "view", 1, "one layout").edit(
        "index.where(here, 0)", "index.where(here, 0).view(-1).view(tokens.shape)"
    ),
    Mutant("tokens in place", "argument changed", "rank 1's tokens", 2, "state").edit(
        "tokens - dist.get_rank() * width", "tokens.sub_(dist.get_rank() * width)"
    ),
)
