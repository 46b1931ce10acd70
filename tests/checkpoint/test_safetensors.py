"""safetensors in and out, by its own library; damage is named."""

import json
import os

import pytest
import torch
from killing import DiskThat, full
from safetensors import torch as library

from distlab.blocks.models import GPT, GPTConfig
from distlab.checkpoint import files, read_safetensors, write_safetensors
from distlab.checkpoint.formats.safetensors import MODEL
from distlab.rng import generator

CONFIG = GPTConfig(vocab_size=31, context=8, num_layers=2, num_heads=2, hidden_size=12, tied=True)
DTYPES = [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.uint16, torch.bool]


def tensors_of_every_kind():
    return {f"odd {dtype}": torch.tensor([1, 0, 1]).to(dtype) for dtype in DTYPES} | {
        "0-dim": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "strided": torch.rand(4, 3).t(),
        "a part": torch.rand(10)[2:5],
        'a "name"\n': torch.arange(3),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
    }


def bits(tensor):
    return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def same(one, other):
    return one.keys() == other.keys() and all(bits(one[key]) == bits(other[key]) for key in one)


def test_the_real_package_reads_what_we_write_and_we_read_what_it_writes(tmp_path):
    state = tensors_of_every_kind()
    path = write_safetensors(tmp_path / "ours", state)
    assert path == tmp_path / "ours" / MODEL
    assert same(library.load_file(path), state)
    assert same(read_safetensors(tmp_path / "ours"), state)
    assert same(read_safetensors(path), state)
    library.save_file(
        {key: value.contiguous().clone() for key, value in state.items()}, tmp_path / "theirs.safetensors"
    )
    assert same(read_safetensors(tmp_path / "theirs.safetensors"), state)


def test_a_model_with_tied_weights_goes_both_ways(tmp_path):
    model, other = GPT(CONFIG, generator(0, 0, "weights")), GPT(CONFIG, generator(1, 0, "weights"))
    path = write_safetensors(tmp_path / "ours", model.state_dict())
    assert library.load_model(other, path) == (set(), [])
    assert same(other.state_dict(), model.state_dict())
    assert same(read_safetensors(path), model.state_dict())
    library.save_model(model, tmp_path / "theirs.safetensors")
    assert same(read_safetensors(tmp_path / "theirs.safetensors"), model.state_dict())


def test_a_sharded_model_is_exported_from_rank_0(ranks, tmp_path):
    def export():
        import torch.distributed as dist

        from distlab.sharding import FullyShard, full_state_dict

        state = full_state_dict(FullyShard(GPT(CONFIG, generator(0, 0, "weights"))), to_rank=0)
        if dist.get_rank() == 0:
            write_safetensors(tmp_path / "model", state)

    ranks(3).run(export)
    assert same(read_safetensors(tmp_path / "model"), GPT(CONFIG, generator(0, 0, "weights")).state_dict())


def test_transformers_loads_the_export(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is the zoo's extra")
    config = transformers.GPT2Config(vocab_size=40, n_positions=16, n_embd=12, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    config.save_pretrained(tmp_path / "ours")
    write_safetensors(tmp_path / "ours", model.state_dict())
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours")
    assert same(loaded.state_dict(), model.state_dict())
    model.save_pretrained(tmp_path / "theirs")
    theirs = read_safetensors(tmp_path / "theirs")
    assert theirs
    assert all(bits(value) == bits(model.state_dict()[name]) for name, value in theirs.items())


def test_nothing_is_overwritten_and_odd_tensors_are_refused(tmp_path):
    path = write_safetensors(tmp_path, {"weight": torch.rand(2)})
    data = path.read_bytes()
    with pytest.raises(ValueError, match="has model.safetensors already; nothing is overwritten"):
        write_safetensors(tmp_path, {"weight": torch.rand(2)})
    assert path.read_bytes() == data
    for value, words in (
        (torch.rand(2, dtype=torch.complex128), "safetensors refuses the state .*complex128"),
        (3, "safetensors refuses the state .*int"),
    ):
        with pytest.raises(ValueError, match=words):
            write_safetensors(tmp_path / "other", {"weight": value})
    assert sorted(os.listdir(tmp_path)) == [MODEL, "other"]


def test_a_disk_that_refuses_leaves_nothing(tmp_path):
    with DiskThat(files, write=full), pytest.raises(OSError, match="No space left"):
        write_safetensors(tmp_path, {"weight": torch.rand(2)})
    assert os.listdir(tmp_path) == []


def forge(header, data=b"\0" * 8):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


WEIGHT = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
FORGED = {
    "nothing": b"",
    "a length alone": (2**62).to_bytes(8, "little"),
    "no JSON": forge(b"\xff\xff"),
    "deep": forge(b"[" * 100_000),
    "fewer bytes": forge({"w": WEIGHT}, b"\0" * 7),
    "a huge tensor": forge({"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}),
}


@pytest.mark.parametrize("kind", FORGED)
def test_forged_files_are_refused(tmp_path, kind):
    (tmp_path / "m.safetensors").write_bytes(FORGED[kind])
    with pytest.raises(ValueError, match="m.safetensors is not an intact safetensors file"):
        read_safetensors(tmp_path / "m.safetensors")


@pytest.mark.parametrize("kind", ["pipe", "folder", "nothing"])
def test_something_else_in_place_of_a_file_is_named(tmp_path, kind):
    path = tmp_path / "m.safetensors"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        (path / MODEL).mkdir(parents=True)
    with pytest.raises(ValueError, match="m.safetensors.* cannot be read"):
        read_safetensors(path)
