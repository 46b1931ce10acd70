"""Files of tokens: documents one after the other, cut into shards, with an index that knows what they must hold.

Shards are tokens-00000.bin, tokens-00001.bin and so on: 16 or 32 bits a token, together one long row. A document or a
sample may lie in several. index.json has the tokens' type, each document's length, each shard's size and checksum.
It is written last, and its own checksum says which tokens these are. Files may not change while a run reads them.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.data import Dataset

from distlab.comm.together import place_in, together


def write_tokens(
    directory: str | Path, documents: Iterable[ArrayLike], *, vocab_size: int, shard_tokens: int = 2**27
) -> None:
    """Write documents into shards; one process calls this.

    Args:
        directory: is made; it may not be there yet.
        documents: the tokens of each: at least two, since one that has no next token teaches nothing.
        vocab_size: tokens are 0 to vocab_size - 1; of up to 65,536 each takes 2 bytes, else 4.
        shard_tokens: of each file but the last.

    Raises:
        ValueError: a document is too short or holds something else, or a shard would hold no token.
    """
    if shard_tokens < 1 or not 1 <= vocab_size <= 2**32:
        raise ValueError(f"shard_tokens is {shard_tokens} and vocab_size {vocab_size}; pass 1 or more, at most 2**32")
    directory, kind = Path(directory), np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
    directory.mkdir(parents=True)
    files, lengths, row, shard_bytes = list[Any](), list[int](), bytearray(), shard_tokens * kind.itemsize

    def write(data: bytearray) -> None:
        files.append([f"tokens-{len(files):05}.bin", len(data), hashlib.sha256(data).hexdigest()])
        (directory / files[-1][0]).write_bytes(data)

    for document in documents:
        tokens = np.asarray(document)
        is_row = tokens.ndim == 1 and len(tokens) >= 2 and tokens.dtype.kind in "iu"
        if not is_row or not 0 <= tokens.min() <= tokens.max() < vocab_size:
            text = f"document {len(lengths)} is {tokens.dtype} {list(tokens.shape)}; pass a row of at least 2 tokens"
            raise ValueError(f"{text}, each 0 to {vocab_size - 1}, or leave it out")
        lengths.append(len(tokens))
        row += tokens.astype(kind).tobytes()
        while len(row) >= shard_bytes:
            write(row[:shard_bytes])
            del row[:shard_bytes]
    if row:
        write(row)
    (directory / "index.json").write_text(json.dumps({"dtype": kind.str, "lengths": lengths, "files": files}))


class TokenFiles(Dataset[Tensor]):
    """Shards of tokens, mapped into memory: its items are the documents, or samples of one length.

    Args:
        directory: as given to `write_tokens`.
        context: sample i is the `context` tokens from i x context on, and the one behind them; None: documents.

    Shapes: item -> [context + 1], or [tokens of the document], int64

    Attributes:
        lengths: tokens of each document [documents].
        identity: the index's checksum: the same for the same tokens in the same shards.

    Raises:
        ValueError: a file is cut short or longer, also the index, or there are too few tokens; FileNotFoundError: one
            is missing.
    """

    def __init__(self, directory: str | Path, context: int | None = None) -> None:
        self.directory, self.context = Path(directory), context
        index = (path := self.directory / "index.json").read_bytes()
        self.identity = hashlib.sha256(index).hexdigest()
        try:
            facts = json.loads(index)
            self.files = [(self.directory / name, size, digest) for name, size, digest in facts["files"]]
            itemsize, num_bytes = np.dtype(facts["dtype"]).itemsize, sum(size for _, size, _ in self.files)
            is_whole = sum(facts["lengths"]) * itemsize == num_bytes
        except (ValueError, TypeError, KeyError):  # half a file is no JSON
            is_whole = False
        if not is_whole:
            raise ValueError(f"{str(path)!r} was cut short or changed; restore the file, or write the tokens again")
        for path, expected, _ in self.files:
            if (size := path.stat().st_size) != expected:
                raise ValueError(f"{str(path)!r} has {size} bytes, the index says {expected}; restore the file")
        self._shards = [np.memmap(path, facts["dtype"], "r").view(np.ndarray) for path, _, _ in self.files]
        self._starts = np.cumsum([0, *map(len, self._shards)]).tolist()
        self.lengths, total = np.array(facts["lengths"]), self._starts[-1]
        starts: Any = np.cumsum(self.lengths) - self.lengths
        self._items = starts if context is None else range(0, total - context, context) if context > 0 else ()
        if not len(self._items):
            raise ValueError(f"context is {context}, and {str(directory)!r} has {total} tokens; pass less, from 1 on")

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Tensor:
        start = int(self._items[index])
        stop = start + (int(self.lengths[index]) if self.context is None else self.context + 1)
        first, last = bisect_right(self._starts, start) - 1, bisect_left(self._starts, stop)
        shards = zip(self._shards[first:last], self._starts[first:last], strict=True)
        parts = [tokens[max(0, start - begin) : stop - begin] for tokens, begin in shards]
        return torch.from_numpy(np.concatenate(parts, dtype=np.int64))

    def __reduce__(self) -> tuple[Any, ...]:  # what is mapped would be pickled whole
        return type(self), (self.directory, self.context)


def open_tokens(directory: str | Path, context: int | None = None, *, group: ProcessGroup | None = None) -> TokenFiles:
    """Open files of tokens on every rank, and compare checksums; every rank of the group calls this.

    Cost: each file is read once, by one of the ranks.

    Raises:
        ValueError: on every rank, when one finds a file changed, cut short or longer; RuntimeError: it is missing.
    """
    rank, world_size = place_in(group)

    def verify() -> None:
        for path, _, expected in TokenFiles(directory, context).files[rank::world_size]:
            with path.open("rb") as opened:
                if hashlib.file_digest(opened, "sha256").hexdigest() != expected:
                    raise ValueError(f"{str(path)!r} was changed: its checksum is not the index's; restore the file")

    together(verify, group, what="open tokens")
    return TokenFiles(directory, context)
