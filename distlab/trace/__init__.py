"""What happened, or should happen, and when: spans in columns, written by each rank, merged, and shown in Perfetto.

Read `span` (`Trace`), `writer` (a rank notes what it does), `merge` (one trace of all ranks), `chrome` (the format of
ui.perfetto.dev) and `foreign` (traces that other programs wrote).
"""

from distlab.trace.chrome import read_chrome, write_chrome
from distlab.trace.merge import load_folder, load_trace, merge, rank_file, save_clocks, save_trace
from distlab.trace.span import Span, Trace
from distlab.trace.writer import OpenCall, SpanWriter

__all__ = [
    "OpenCall",
    "Span",
    "SpanWriter",
    "Trace",
    "load_folder",
    "load_trace",
    "merge",
    "rank_file",
    "read_chrome",
    "save_clocks",
    "save_trace",
    "write_chrome",
]
