"""What `distlab.blocks.data` has, at the place where learners import it."""

from distlab.blocks.data import (
    ByteCorpus as ByteCorpus,
    Digits as Digits,
    SampleOrder as SampleOrder,
    digits as digits,
    python_documentation as python_documentation,
    rank_slice as rank_slice,
    read_text as read_text,
)
