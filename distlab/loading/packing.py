"""Packing: contexts filled with documents, which do not see each other.

One document a row, padded, computes as much for padding as for tokens. Packed, two things keep documents apart:
`positions` begin at 0 in each, and a mask lets a token attend to its own document alone. Then each document gets what
it would get by itself. Of its k tokens each but the last is an input, and each but the first a target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.utils.data import Dataset

from distlab.loading.balance import attention_work
from distlab.loading.token_files import TokenFiles


class PackedRow(NamedTuple):
    """Documents in a row, or a batch of rows.

    Attributes:
        inputs: [..., S], int64; padding is 0.
        targets: [..., S], the token behind each input; of padding -100, which torch's cross_entropy leaves out.
        positions: [..., S], from 0 in each document; of padding 0.
        documents: [..., S], the number of the document in its row; of padding -1.
    """

    inputs: Tensor
    targets: Tensor
    positions: Tensor
    documents: Tensor


def pack(lengths: ArrayLike, context: int, *, in_order: bool = False) -> list[list[int]]:
    """Return which documents share a row: the longest first, each in the row with the least room that holds it.

    Args:
        lengths: inputs of each document.
        context: inputs of a row.
        in_order: documents stay in their order; each goes into the last row or begins a new one.

    Raises:
        ValueError: a document is longer than the context.

    Source: Johnson et al. 1974 (best fit decreasing: at most 11/9 of the fewest rows, where these are many).
    """
    sizes = np.asarray(lengths, np.int64)
    wrong = np.flatnonzero((sizes < 1) | (sizes > context)).tolist()
    if wrong:
        text = f"document {wrong[0]} has {sizes[wrong[0]]} inputs, and a row holds 1 to {context}"
        raise ValueError(f"{text}; cut it into documents of at most {context + 1} tokens, or use a larger context")
    rows, with_room, rooms = list[list[int]](), [list[int]() for _ in range(context + 1)], 0  # bit r: a row has room r
    for document in (np.arange(len(sizes)) if in_order else np.argsort(-sizes, kind="stable")).tolist():
        size = int(sizes[document])
        if fitting := rooms >> size << size:
            room = (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            rooms ^= (not with_room[room]) << room
        else:
            if in_order:  # the rows so far are full
                with_room, rooms = [[] for _ in with_room], 0
            row, room = len(rows), context
            rows.append([])
        rows[row].append(document)
        with_room[room - size].append(row)
        rooms |= 1 << (room - size)
    return rows


def join(documents: Sequence[Tensor], context: int | None = None) -> PackedRow:
    """Lay documents one after the other, padded to a context if there is one; also a `collate_fn` for `Loader`.

    Shapes: documents [k] each -> [context, or the sum of k - 1]
    """
    sizes = [len(document) - 1 for document in documents]
    row = PackedRow(
        torch.cat([document[:-1] for document in documents]),
        torch.cat([document[1:] for document in documents]),
        torch.cat([torch.arange(size) for size in sizes]),
        torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)),
    )
    missing = 0 if context is None else context - sum(sizes)
    return PackedRow(*(F.pad(each, (0, missing), value=fill) for each, fill in zip(row, (0, -100, 0, -1), strict=True)))


def document_mask(documents: Tensor) -> Tensor:
    """Return what each position attends to, for `scaled_dot_product_attention(..., attn_mask=...)`: True where it does.

    A token sees its own document up to itself, and padding sees padding: an empty row would give NaN.

    Shapes: documents [..., S] -> [..., 1, S, S], bool; the 1 is for the heads
    """
    return (documents.unsqueeze(-1) == documents.unsqueeze(-2)).tril().unsqueeze(-3)


class PackedDocuments(Dataset[PackedRow]):
    """Rows of packed documents, from files opened without a context.

    Attributes:
        rows: which documents share each row.
        lengths: inputs of each row that are no padding [rows].
        waste: the part of all inputs that is padding.
        identity: of the files and the rows.

    Error: a document's outputs are those of the document alone, up to the order of sums.

    Raises:
        ValueError: a document is longer than the context.
    """

    def __init__(self, documents: TokenFiles, context: int, *, in_order: bool = False) -> None:
        self._documents, self._context, self._sizes = documents, context, documents.lengths - 1
        self.rows = pack(self._sizes, context, in_order=in_order)
        self.lengths = np.array([self._sizes[row].sum() for row in self.rows])
        self.waste = float(1 - self._sizes.sum() / (len(self.rows) * context))
        self.identity = f"{documents.identity}, context {context}, in_order {in_order}"

    def work(self, hidden_size: int) -> NDArray[np.float64]:
        """Return each row's work [rows] where attention skips what the mask hides; see `attention_work`."""
        each = attention_work(self._sizes, hidden_size)
        return np.array([each[row].sum() for row in self.rows])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> PackedRow:
        return join([self._documents[document] for document in self.rows[index]], self._context)
