import sys

import pytest
import torch
from _rows import absolute
from _script import backend_of, run_script


def test_rows_are_printed_as_they_come(capsys, monkeypatch):
    def rows(quick=False, device="cpu"):
        yield absolute(f"quick is {quick} on {device}", [1.0], bar=2.0, unit="s")
        assert "quick is True on cpu" in capsys.readouterr().out  # before the next one is measured
        raise ValueError("no such machine")

    monkeypatch.setattr(sys, "argv", ["bench", "--quick"])
    with pytest.raises(SystemExit, match="error: no such machine"):
        run_script("What it is.", rows, devices=True)


def test_a_device_is_asked_for_only_where_there_is_a_choice(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench", "--device", "cuda"])
    with pytest.raises(SystemExit, match="2"):
        run_script("What it is.", lambda quick: iter(()))
    assert "--device" in capsys.readouterr().err


def test_ranks_without_a_gpu_each_use_gloo(monkeypatch):
    assert backend_of("cpu", 2) == "gloo"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="torch sees no GPU here; leave --device out"):
        backend_of("cuda", 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [backend_of("cuda", ranks) for ranks in (1, 2, 3)] == ["nccl", "nccl", "gloo"]
