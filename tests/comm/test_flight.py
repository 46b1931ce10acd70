"""Dumps of torch's flight recorder: read whoever wrote them, and no code of them runs."""

import os
import pickle
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distlab.cli import main
from distlab.comm import run
from distlab.comm.where.flight import analyzed, read_dump, read_dumps


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
            "output_sizes": [list(shape)],
            "output_dtypes": ["Float"],
            "is_p2p": False,
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
    text = capsys.readouterr().out
    assert "collective: nccl:all_reduce\nmissing ranks: {1}" in text
    assert "step at /home/me/train.py:30" in text
    (tmp_path / "fr_1").write_bytes(pickle.dumps(dump_of(1, shape=(5,))))
    assert main(["where", "--dumps", str(tmp_path / "fr_")]) == 0
    text = capsys.readouterr().out
    assert "Collective sequence number: 1 has errors" in text
    assert "Culprit rank 1; Error type: SIZE_OR_SYNTAX_MISMATCH" in text
    assert main(["where", "--dumps", str(tmp_path / "none")]) == 2
    assert "there are no files" in capsys.readouterr().err


DAMAGED = [Bomb(), {"pg_config": {}, "entries": [Bomb()]}, [1], {"pg_config": {}}]


@pytest.mark.parametrize("data", [b"", *map(pickle.dumps, DAMAGED)])
def test_no_code_of_a_dump_runs_and_damage_is_told(data):
    with pytest.raises(ValueError, match="f is not a dump of torch's flight recorder"):
        read_dump(data, "f")
    assert not os.path.exists("/tmp/distlab-bomb-went-off")


def test_a_dump_of_which_a_part_is_not_torchs_is_refused_in_words():
    with pytest.raises(ValueError, match="torch's analyzer does not understand these dumps"):
        analyzed({0: dump_of(0) | {"entries": [{}]}})


def write_a_dump(prefix):
    from torch._C._distributed_c10d import _dump_fr_trace

    dist.all_reduce(torch.ones(3))
    dist.broadcast(torch.ones(2, 2), 0)
    Path(f"{prefix}{dist.get_rank()}").write_bytes(_dump_fr_trace())


def test_what_torch_itself_writes_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    run(write_a_dump, 1, args=(str(tmp_path / "d"),), backend="gloo")
    assert analyzed(read_dumps(tmp_path / "d")) == "no calls that differ, and none that lacks a rank"
