"""Files of tokens: documents one after the other, cut into shards, with an index that knows what they must hold.

    tokens-00000.bin  tokens-00001.bin  ...     16 or 32 bits each; together they are one long row
    documents.bin                               where each document ends in that row, 64 bits each
    index.json                                  the type of the tokens; name, bytes and checksum of each file

A document, or a sample, may lie in several shards. The index is written last: a directory without one is not finished.
Its own checksum says which tokens these are. Files may not change while a run reads them: what is mapped and then cut
short ends the process that touches it.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.data import Dataset

from distlab.comm import agree
from distlab.comm.together import place_in, together

INDEX, ENDS, KIND = "index.json", "documents.bin", "tokens of distlab, version 1"


def write_tokens(
    directory: str | Path, documents: Iterable[ArrayLike], *, vocab_size: int, shard_tokens: int = 2**27
) -> None:
    """Write documents into shards; one process calls this, once for each directory.

    Args:
        directory: is made; it may not hold an index yet.
        documents: the tokens of each: at least two, since one that has no next token teaches nothing.
        vocab_size: tokens are 0 to vocab_size - 1; of up to 65,536 each takes 2 bytes, else 4.
        shard_tokens: of each file but the last.

    Raises:
        ValueError: a document is too short or holds something else, there is none, or the directory has an index.
    """
    directory = Path(directory)
    if shard_tokens < 1 or (directory / INDEX).exists():
        raise ValueError(f"shard_tokens is {shard_tokens}; pass 1 or more, and a directory without an {INDEX}")
    directory.mkdir(parents=True, exist_ok=True)
    kind = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
    files, ends, kept = list[list[Any]](), [0], [np.empty(0, kind)]

    def write(name: str, data: bytes) -> None:
        (directory / name).write_bytes(data)
        files.append([name, len(data), hashlib.sha256(data).hexdigest()])

    def write_shards(least: int) -> None:  # at the end also one that is not full
        while ends[-1] - len(files) * shard_tokens >= least:
            row = np.concatenate(kept)
            kept[:] = [row[shard_tokens:]]
            write(f"tokens-{len(files):05}.bin", row[:shard_tokens].tobytes())

    for number, document in enumerate(documents):
        tokens = np.asarray(document)
        is_row = tokens.ndim == 1 and len(tokens) >= 2 and tokens.dtype.kind in "iu"
        if not is_row or not 0 <= tokens.min() <= tokens.max() < vocab_size:
            raise ValueError(
                f"document {number} is {tokens.dtype} {list(tokens.shape)}; pass a row of at least 2 tokens, each 0 to "
                f"{vocab_size - 1}, or leave it out"
            )
        ends.append(ends[-1] + len(tokens))
        kept.append(tokens.astype(kind))
        write_shards(shard_tokens)
    write_shards(1)
    if not files:
        raise ValueError("there is no document; pass at least one")
    write(ENDS, np.array(ends[1:], "<i8").tobytes())
    (directory / "index.part").write_text(json.dumps({"kind": KIND, "dtype": kind.str, "files": files}))
    os.replace(directory / "index.part", directory / INDEX)


class TokenFiles(Dataset[Tensor]):
    """Shards of tokens, mapped into memory: its items are the documents, or samples of one length.

    Args:
        directory: as given to `write_tokens`.
        context: sample i is the `context` tokens from i x context on, and the one behind them; None: items are
            documents.

    Shapes: item -> [context + 1], or [tokens of the document], int64

    Attributes:
        lengths: tokens of each document [documents].
        identity: the index's checksum: the same for the same tokens in the same shards.

    Raises:
        ValueError: there is no index, a file is missing, cut short or longer, or there are too few tokens.
    """

    def __init__(self, directory: str | Path, context: int | None = None) -> None:
        self.directory, self.context = Path(directory), context
        try:
            data = (self.directory / INDEX).read_bytes()
            index = json.loads(data)
            self.files = [(str(name), int(size), str(digest)) for name, size, digest in index["files"]]
            self._type = np.dtype({"<u2": "<u2", "<u4": "<u4"}[index["dtype"]])
            sizes = [(self.directory / name).stat().st_size for name, _, _ in self.files]
        except (OSError, ValueError, TypeError, KeyError) as error:
            text = f"{str(directory)!r} holds no whole files of tokens ({type(error).__name__}: {error})"
            raise ValueError(f"{text}; restore the files, or write them with write_tokens") from error
        for (name, expected, _), size in zip(self.files, sizes, strict=True):
            if size != expected:
                how = "cut short" if size < expected else "longer"
                text = f"{str(self.directory / name)!r} is {how}: {size} bytes, the index says {expected}"
                raise ValueError(f"{text}; restore the file")
        self.identity = hashlib.sha256(data).hexdigest()
        self._starts = np.cumsum([0, *(size // self._type.itemsize for size in sizes[:-1])]).tolist()
        self._maps: dict[str, NDArray[Any]] = {}
        if context is not None and not 0 < context < self._starts[-1]:
            raise ValueError(f"context is {context}, and {str(directory)!r} has {self._starts[-1]} tokens; pass less")

    @property
    def lengths(self) -> NDArray[np.int64]:  # noqa: D102, of the class
        return np.diff(self._map(ENDS, np.dtype("<i8")), prepend=0)

    def __len__(self) -> int:
        return int(self._starts[-1] - 1) // self.context if self.context else self.files[-1][1] // 8

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"item {index} of {len(self)}; the first is 0")
        if self.context:
            return self.read(index * self.context, (index + 1) * self.context + 1)
        ends = self._map(ENDS, np.dtype("<i8"))
        return self.read(int(ends[index - 1]) if index else 0, int(ends[index]))

    def read(self, start: int, stop: int) -> Tensor:
        """Return tokens start to stop - 1 of the row.

        Shapes: -> [stop - start], int64
        """
        parts: list[NDArray[Any]] = []
        shard = bisect_right(self._starts, start) - 1
        while start < stop:
            begin, end = self._starts[shard : shard + 2]
            parts.append(self._map(self.files[shard][0], self._type)[start - begin : stop - begin])
            start, shard = end, shard + 1
        return torch.from_numpy(np.concatenate(parts, dtype=np.int64))

    def _map(self, name: str, kind: np.dtype[Any]) -> NDArray[Any]:
        if name not in self._maps:
            self._maps[name] = np.memmap(self.directory / name, dtype=kind, mode="r").view(np.ndarray)  # faster to cut
        return self._maps[name]

    def __getstate__(self) -> dict[str, Any]:  # workers map the files anew; pickled, a map is the whole file
        return {**vars(self), "_maps": {}}


def open_tokens(directory: str | Path, context: int | None = None, *, group: ProcessGroup | None = None) -> TokenFiles:
    """Open files of tokens on every rank, and compare checksums; every rank of the group calls this.

    Cost: each file is read once, by one of the ranks.

    Raises:
        ValueError: on every rank, when one cannot open a file or finds it changed, or ranks see different tokens.
    """
    rank, world_size = place_in(group)

    def verify() -> None:
        files = TokenFiles(directory, context)
        for name, _, expected in files.files[rank::world_size]:
            with (files.directory / name).open("rb") as opened:
                if hashlib.file_digest(opened, "sha256").hexdigest() != expected:
                    text = f"{str(files.directory / name)!r} was changed since it was written"
                    raise ValueError(f"{text}: its checksum is not the index's; restore the file")

    together(verify, group, what="open tokens")
    files = TokenFiles(directory, context)
    if world_size > 1:
        agree(files.identity, group, what=f"the checksum of the index in {str(directory)!r}")
    return files
