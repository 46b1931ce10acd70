"""Dumps of torch's flight recorder: read whoever wrote them, and no code of them runs."""

import contextlib
import json
import os
import pickle
import subprocess
import sys
import time

import pytest

from distlab.cli import main
from distlab.comm.where.flight import read_dump, read_dumps, records_of

RECORDED = """
import sys
import torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
dist.broadcast(torch.ones(2, 2), 0)
open(sys.argv[1] + "0", "wb").write(_dump_fr_trace())
dist.destroy_process_group()
"""


class Bomb:
    def __reduce__(self):
        return os.system, ("touch /tmp/distlab-bomb-went-off",)


def dump_of(rank, *, shape=(4,), last=3, state="scheduled"):
    """A dump as torch writes it, of a rank that has come to collective number `last`."""
    entries = [
        {
            "record_id": number - 1,
            "process_group": ("0", "default_pg"),
            "collective_seq_id": number,
            "p2p_seq_id": 0,
            "profiling_name": "nccl:all_reduce",
            "time_created_ns": time.time_ns(),
            "input_sizes": [list(shape)],
            "input_dtypes": ["Float"],
            "state": "completed" if number < last else state,
            "retired": number < last,
            "frames": [{"filename": "/home/me/train.py", "line": 10 * number, "name": "step"}],
        }
        for number in range(1, last + 1)
    ]
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    return {"version": "2.5", "pg_config": config, "entries": entries}


def test_dumps_alone_name_who_is_behind_and_what_does_not_fit(tmp_path, capsys):
    for rank, dump in enumerate([dump_of(0), dump_of(1, last=2, state="completed")]):
        (tmp_path / f"fr_{rank}").write_bytes(pickle.dumps(dump))
    assert main(["where", "--dumps", str(tmp_path / "fr_")]) == 0
    assert (
        "rank 0 waits for rank 1 in all_reduce #3 (float[4], group [0, 1]) at /home/me/train.py:30"
        in capsys.readouterr().out
    )
    (tmp_path / "fr_1").write_text(json.dumps(dump_of(1, shape=(5,))))
    assert main(["where", "--dumps", str(tmp_path / "fr_")]) == 0
    text = capsys.readouterr().out
    assert "do not make the same call, at their call #1:\n  rank 0: all_reduce #1 (float[4]" in text
    assert "rank 1: all_reduce #1 (float[5]" in text


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Bomb()),
        pickle.dumps({"pg_config": {}, "entries": [Bomb()]}),
        b"",
        b"{",
        b"\x80\x04.",
        pickle.dumps([1]),
        json.dumps({"pg_config": {}}).encode(),
    ],
)
def test_no_code_of_a_dump_runs_and_damage_is_told(data):
    with pytest.raises(ValueError, match="f is not a dump of torch's flight recorder"):
        read_dump(data, "f")
    assert not os.path.exists("/tmp/distlab-bomb-went-off")


@pytest.mark.parametrize("odd", [None, -1, 2**70, "x", {}, [None]])
def test_a_dump_of_which_a_part_is_not_torchs_is_refused_or_read(tmp_path, odd):
    good = dump_of(0)
    entry = good["entries"][-1]
    damaged = [{**entry, field: odd} for field in entry]
    damaged += [{key: value for key, value in entry.items() if key != field} for field in entry]
    for entries in [odd, [odd], *([*good["entries"][:-1], one] for one in damaged)]:
        (tmp_path / "d0").write_bytes(pickle.dumps(good | {"entries": entries}))
        with contextlib.suppress(ValueError):  # any other error fails
            read_dumps(tmp_path / "d")
    with pytest.raises(ValueError, match="the dump of rank 0 is damaged"):
        records_of({0: good | {"entries": [None]}})
    unknown = entry | {"profiling_name": "x:y"}
    (tmp_path / "d0").write_bytes(pickle.dumps(good | {"entries": [*good["entries"], unknown]}))
    assert len(read_dumps(tmp_path / "d").calls(0)) == 3, "what we do not know is left out"


def test_what_torch_itself_writes_is_read(tmp_path):
    environment = os.environ | {"TORCH_FR_BUFFER_SIZE": "100"}
    command = [sys.executable, "-c", RECORDED, str(tmp_path / "d")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    said = [str(call).partition(" at ")[0] for call in read_dumps(tmp_path / "d")]
    assert said == ["all_reduce #1 (float[3], group [0])", "broadcast #2 (float[2, 2], group [0])"]
