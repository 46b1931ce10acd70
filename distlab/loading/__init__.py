"""Loading: samples that arrive in time, each on one rank once, and on from any position on any number of ranks.

Begin with `plain`: a mapped file, one number and a slice. `shards` writes documents and refuses what was changed,
`loader` has workers that read ahead, and `lengths` packs documents into rows, or gives each rank as much to do.
"""

from distlab.loading.lengths import (
    PackedDocuments as PackedDocuments,
    PackedRow as PackedRow,
    attention_work as attention_work,
    balance as balance,
    document_mask as document_mask,
    join as join,
)
from distlab.loading.loader import Loader as Loader, LoaderRate as LoaderRate, loader_rate as loader_rate
from distlab.loading.plain import PlainLoader as PlainLoader
from distlab.loading.shards import TokenFiles as TokenFiles, open_tokens as open_tokens, write_tokens as write_tokens
