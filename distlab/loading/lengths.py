"""Unequal lengths: documents packed into rows, where they do not see each other, or samples balanced over ranks.

Documents side by side are padded to the longest, and padding is computed too. Packed, two things keep them apart:
`positions` begin at 0 in each, and a mask lets a token attend to its own document alone. Unpacked, the rank with the
longest ones makes all wait: which samples a batch has stays, and who takes which is free.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset

from distlab.loading.shards import TokenFiles
from distlab.plan import assign_owners


class PackedRow(NamedTuple):
    """Documents in a row, or a batch of rows; each is [..., S], int64."""

    inputs: Tensor  # of padding 0
    targets: Tensor  # the token behind each input; of padding -100, which torch's cross_entropy leaves out
    positions: Tensor  # from 0 in each document; of padding 0
    documents: Tensor  # the number of the document in its row; of padding -1


def join(documents: Sequence[Tensor], context: int | None = None) -> PackedRow:
    """Lay documents one after the other, padded to a context if there is one; also a `collate_fn` for `Loader`.

    Shapes: documents [k] each -> [context, or the sum of k - 1]
    """
    numbers = [torch.full_like(document[1:], number) for number, document in enumerate(documents)]
    inputs, targets = [document[:-1] for document in documents], [document[1:] for document in documents]
    row = [torch.cat(each) for each in (inputs, targets, [torch.arange(len(own)) for own in numbers], numbers)]
    missing = 0 if context is None else context - len(row[0])
    if missing < 0:
        raise ValueError(
            f"{len(row[0])} inputs are more than the context, {context}; join fewer documents, or cut some"
        )
    return PackedRow(*(pad(each, (0, missing), value=fill) for each, fill in zip(row, (0, -100, 0, -1), strict=True)))


def document_mask(documents: Tensor) -> Tensor:
    """Return what each position attends to, for `scaled_dot_product_attention(..., attn_mask=...)`: True where it does.

    A token sees its own document up to itself, and padding sees padding: an empty row would give NaN.

    Shapes: documents [..., S] -> [..., 1, S, S], bool; the 1 is for the heads
    """
    return (documents.unsqueeze(-1) == documents.unsqueeze(-2)).tril().unsqueeze(-3)


class PackedDocuments(Dataset[PackedRow]):
    """Rows of packed documents: the longest first, each in the row with the least room that holds it.

    Args:
        documents: files opened without a context.
        context: inputs of a row.
        in_order: documents stay in their order; each goes into the last row or begins a new one.

    Attributes:
        rows: which documents share each row.
        lengths: inputs of each row that are no padding [rows].
        waste: the part of all inputs that is padding.
        identity: of the files and the rows.

    Error: a document's outputs are those of the document alone, up to the order of sums.

    Raises:
        ValueError: a document is longer than the context, or the files were opened with one.

    Source: Johnson et al. 1974 (best fit decreasing: at most 11/9 of the fewest rows, where these are many).
    """

    def __init__(self, documents: TokenFiles, context: int, *, in_order: bool = False) -> None:
        self._documents, self._context, sizes = documents, context, documents.lengths - 1
        if documents.context is not None:
            raise ValueError(f"the files' items are samples of {documents.context} tokens; open them without a context")
        if sizes.max() > context:
            text = f"document {sizes.argmax()} has {sizes.max()} inputs, and a row holds {context}"
            raise ValueError(f"{text}; cut it into documents of at most {context + 1} tokens, or use a larger context")
        self.rows: list[list[int]] = []
        rooms: list[tuple[int, int]] = []  # what is free in a row, and its number, ascending
        for document in (np.arange(len(sizes)) if in_order else np.argsort(-sizes, kind="stable")).tolist():
            place = bisect_left(rooms, (sizes[document], 0))
            if place == len(rooms):
                rooms, place = [(context, len(self.rows)), *([] if in_order else rooms)], 0  # in order, others are full
                self.rows.append([])
            room, row = rooms.pop(place)
            self.rows[row].append(document)
            insort(rooms, (room - int(sizes[document]), row))
        self.lengths = np.array([sizes[row].sum() for row in self.rows])
        self.waste = float(1 - self.lengths.mean() / context)
        self.identity = f"{documents.identity}, context {context}, in_order {in_order}"

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> PackedRow:
        return join([self._documents[document] for document in self.rows[index]], self._context)


def attention_work(lengths: ArrayLike, hidden_size: int) -> NDArray[np.float64]:
    """Return a GPT's work on samples of k tokens, in one token's products with weights: k (1 + k / 6h), hidden size h.

    Shapes: lengths [N] -> [N]

    Source: Narayanan et al. 2021 (2104.04473), equation 2: 12 h^2 weights, and 2 h numbers of each token attended to.
    """
    sizes = np.asarray(lengths, np.float64)
    return np.asarray(sizes * (1 + sizes / (6 * hidden_size)))


def balance(work: ArrayLike, num_ranks: int) -> list[list[int]]:
    """Return the samples of each rank: the one with most work first, each to the rank that is least busy.

    Error: as of `assign_owners`; each rank has a sample, if there are enough with work.
    """
    costs = np.asarray(work, np.float64)
    owners = assign_owners(costs.tolist(), num_ranks)
    falling = np.argsort(-costs, kind="stable").tolist()
    return [[sample for sample in falling if owners[sample] == rank] for rank in range(num_ranks)]
