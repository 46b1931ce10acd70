"""Loading: samples that arrive in time, each on one rank once, and on from any position on any number of ranks.

Begin with `plain`: a mapped file, one number and a slice. `token_files` writes documents into shards and refuses what
was changed, `loader` has workers that read ahead, `packing` fills contexts with documents that do not see each other,
and `balance` gives each rank as much to do. The order of samples is `distlab.data.SampleOrder`.
"""

from distlab.loading.balance import attention_work as attention_work, balance as balance
from distlab.loading.loader import Loader as Loader, LoaderRate as LoaderRate, loader_rate as loader_rate
from distlab.loading.packing import (
    PackedDocuments as PackedDocuments,
    PackedRow as PackedRow,
    document_mask as document_mask,
    join as join,
    pack as pack,
)
from distlab.loading.plain import PlainLoader as PlainLoader
from distlab.loading.token_files import (
    TokenFiles as TokenFiles,
    open_tokens as open_tokens,
    write_tokens as write_tokens,
)
