"""What a rank prints, line by line, as it comes."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import sys
from collections import deque
from collections.abc import Iterator

_LINE_END = re.compile(r"\r\n|\n|\r")
MAX_LINE = 65536  # a longer line is passed on in pieces: to join it anew at every read would take quadratic time
MAX_READ = 1 << 20  # bytes per read: a rank that prints without end must not stop its launcher from its other work


class Screen:
    """This program's standard output, which shows what ranks print until it takes no more (a full disk, say)."""

    def __init__(self, *, is_on: bool = True) -> None:
        self._is_on = is_on

    def show(self, text: str) -> None:
        """Write a text."""
        with self._while_it_takes_any():
            if self._is_on and sys.stdout is not None:  # a program whose output is closed has none
                try:
                    sys.stdout.write(text)
                except UnicodeEncodeError as error:  # this program's output takes fewer characters than a rank's
                    sys.stdout.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))

    def flush(self) -> None:
        """Let what was written appear."""
        with self._while_it_takes_any():
            if self._is_on and sys.stdout is not None:
                sys.stdout.flush()

    @contextlib.contextmanager
    def _while_it_takes_any(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:  # nobody reads it any more: the program ends, as others do
            raise
        except OSError as error:
            self._is_on = False
            with contextlib.suppress(Exception):
                print(
                    f"the ranks go on, but what they print is shown no more ({error.strerror}, where this program's "
                    "standard output goes); make room there, or let it go elsewhere",
                    file=sys.stderr,
                )


class Output:
    """A rank's standard output and error, split into whole lines, which appear on a screen."""

    def __init__(self, rank: int, fd: int, screen: Screen) -> None:
        self.rank, self.fd, self.screen = rank, fd, screen
        self.last = deque[str](maxlen=20)
        self.num_bytes = 0
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._partial = ""
        os.set_blocking(fd, False)

    def read(self) -> bool:
        """Pass on what has arrived, at most about MAX_READ bytes, and return whether more may come."""
        limit = self.num_bytes + MAX_READ
        while self.num_bytes < limit:
            try:
                data = os.read(self.fd, 65536)
            except BlockingIOError:
                return True
            if not data:
                self.flush()
                return False
            self.num_bytes += len(data)
            *lines, self._partial = _LINE_END.split(self._partial + self._decode(data))
            for line in lines:
                self._pass_on(line)
            if len(self._partial) > MAX_LINE:
                self.flush()
        return True

    def flush(self) -> None:
        """Pass on a last line that has no line end."""
        if self._partial:
            self._pass_on(self._partial)
            self._partial = ""

    def _pass_on(self, line: str) -> None:
        self.last.append(line)
        self.screen.show(f"[rank {self.rank}] {line}\n")
