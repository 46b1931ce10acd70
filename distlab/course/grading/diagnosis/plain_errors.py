"""Say in words what an error of Python or torch means in an answer: the usual mistakes of type, shape and dtype.

The error's own text stays; the words come after it, and say no more than it shows. One not known here gets none.
"""

from __future__ import annotations

import re

_NONE = (
    "a value is None here. dist.all_reduce, list.append and other calls that work in place return None; so does a "
    "function without a return; a gradient is None before backward"
)
_INDEX = (
    "an index, a size or a count must be an integer here: `//` divides integers, `.long()` converts a tensor, `int()` "
    "a number"
)
_DTYPES = "two tensors of different dtypes meet here: convert one of them, such as `a.to(b.dtype)`"

_MEANINGS = {  # a pattern of the error's text, and what it means: the first that is found
    r"tensors used as indices must|slice indices must|integers or slices, not float|'float' object cannot be": _INDEX,
    r"[Ee]xpected dtype int\S* for index|index_\w+\(\): .*index .*(int|Long)|only integer tensors of a": _INDEX,
    r"Expected tensor for argument #1 'indices' to have one of the following scalar types: Long": _INDEX,
    r"must be (?:tuple of ints|int), .*float": _INDEX,
    r"shape '(\[.*?\])' is invalid for input of size (\d+)": (
        "{1} elements do not fill the shape {0}: print both before this line"
    ),
    r"mat1 and mat2 shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)": (
        "`a @ b` needs as many columns in a ({0}) as rows in b ({1}): must one of them be transposed?"
    ),
    r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)": (
        "tensors of sizes {0} and {1} meet in one operation: print both shapes before this line"
    ),
    r"'NoneType' object|must be Tensor, not NoneType|unsupported operand type\(s\).*'NoneType'": _NONE,
    r"must be Tensor, not (\w+)|expected Tensor as element \d+ in argument \d+, but got (\w+)": (
        "torch wants a tensor here, and got a {0}: torch.tensor makes one of numbers, torch.stack one of tensors"
    ),
    r"Invalid function argument. Expected parameter `?(\w+)`?.* (?:torch\.)?Tensor": (
        "torch.distributed sends tensors, and here `{0}` is something else: put numbers into torch.tensor(...)"
    ),
    r"have the same dtype|dtypes match|expected scalar type|dtype did not match": _DTYPES,
    r"can't be cast to the desired output|tensors with different dtypes|[Tt]ensors? .*same (data ?)?type": _DTYPES,
    r"not implemented for '(\w+)'": (
        "this operation does not exist for a tensor of dtype {0}: shifts, & and | need integers, division and "
        "square roots need floats"
    ),
    r"mean\(\): could not infer|mean\(\): input dtype": "the mean of integers: convert the tensor to float first",
    r"leaf Variable that requires grad is being used in an in-place|leaf.* in-place operation": (
        "autograd records what happens to parameters: change them inside `with torch.no_grad():`"
    ),
    r"does not require grad and does not have a grad_fn": (
        "backward starts at a tensor that does not depend on parameters: was it detached, or made in no_grad?"
    ),
    r"Trying to backward through the graph a second time": (
        "backward ran twice through one graph: run forward again, or add up the losses before one backward"
    ),
    r"Boolean value of Tensor with more than one": "`if` got a whole tensor: ask for .any(), .all() or an element",
    r"view size is not compatible|[Tt]ensors? must be contiguous|be contiguous": (
        "the tensor is not contiguous (a transposed or strided view): use .contiguous() or .reshape()"
    ),
    r"rank should not be the same as the rank of the current process|(?:send to|receive from) itself": (
        "a rank sends to, or receives from, itself here: one rank alone needs no message; of more, print who is named"
    ),
    r"(list|tuple) index out of range": "the {0} is shorter than this index needs: print its length",
    r"index (-?\d+) is out of bounds for dimension (\d+) with size (\d+)|index out of range in self": (
        "an index is outside its tensor, whose places count from 0 to its size - 1: print the smallest and the "
        "largest index"
    ),
    r"(storage_offset|size|stride)\(.*\) must be .* to view Byte as (\w+)": (
        "bytes are read as numbers here ({1}, several bytes each): the piece must hold whole numbers, lie without "
        "gaps, and begin at a multiple of a number's size; piece.clone() begins anew"
    ),
    r"needed for gradient computation has been modified by an in-?place|view and is being modified in-?place": (
        "autograd needs this tensor as it was: make a new one (masked_fill, torch.where, a + b), or change a clone"
    ),
    r"can't call numpy\(\) on Tensor that requires grad": "call .detach() before .numpy()",
}


def in_words(error: str) -> str:
    """Return what an error's text means, or "" where it is not one of the usual ones."""
    for pattern, words in _MEANINGS.items():
        if found := re.search(pattern, error):
            return words.format(*(group for group in found.groups() if group is not None), "number")
    return ""
