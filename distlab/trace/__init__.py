"""What happened, or should happen, and when: spans in columns, written by each rank, merged, and shown in Perfetto.

Read `trace` (`Trace`; and `SpanWriter`: a rank notes what it does), `critical_path` (what decides how long it is) and
`chrome` (files in the format of ui.perfetto.dev, and one trace of all ranks).
"""

from distlab.trace.chrome import (
    load_folder as load_folder,
    merge as merge,
    rank_file as rank_file,
    read_chrome as read_chrome,
    save_clocks as save_clocks,
    save_trace as save_trace,
    write_chrome as write_chrome,
)
from distlab.trace.critical_path import CriticalPath as CriticalPath
from distlab.trace.span import Span as Span
from distlab.trace.trace import OpenCall as OpenCall, SpanWriter as SpanWriter, Trace as Trace
