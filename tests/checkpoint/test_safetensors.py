"""safetensors in and out, by its own library; damage is named."""

import json
import os

import pytest
import torch
import torch.distributed as dist
from safetensors import torch as library

from distlab.blocks.models import GPT, GPTConfig
from distlab.checkpoint import read_safetensors, write_safetensors
from distlab.checkpoint.safetensors import MODEL
from distlab.rng import generator
from distlab.sharding import FullyShard, full_state_dict

CONFIG = GPTConfig(vocab_size=31, context=8, num_layers=2, num_heads=2, hidden_size=12, tied=True)
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "complex64", "int64", "int32", "int16", "int8", "bool"),
    *("uint64", "uint32", "uint16", "uint8", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz"),
    *("float8_e5m2fnuz", "float4_e2m1fn_x2"),
)


def bits(tensor):
    return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def same(one, other):
    return one.keys() == other.keys() and all(bits(one[key]) == bits(other[key]) for key in one)


def test_the_real_package_reads_what_we_write_and_we_read_what_it_writes(tmp_path):
    eight = torch.tensor([1, 0, 1, 1, 0, 0, 0, 1], dtype=torch.uint8)
    state = {name: eight.clone().view(getattr(torch, name)) for name in DTYPES}
    state |= {"0-dim": torch.tensor(2.5), "empty": torch.empty(0, 3), "strided": torch.rand(4, 3).t()}
    state |= {'a "name"\n': torch.rand(10)[2:5], "nan": torch.tensor([float("nan"), float("inf"), -0.0])}
    path = write_safetensors(tmp_path / "ours", state)
    assert path == tmp_path / "ours" / MODEL
    assert same(library.load_file(path), state)
    assert same(read_safetensors(tmp_path / "ours"), state)
    library.save_file({key: value.contiguous().clone() for key, value in state.items()}, tmp_path / "theirs")
    assert same(read_safetensors(tmp_path / "theirs"), state)


@pytest.mark.on_ranks(2)
def test_a_sharded_model_with_tied_weights_goes_both_ways(tmp_path):
    model, other = (GPT(CONFIG, generator(seed, 0, "weights")) for seed in (0, 1))
    state = full_state_dict(FullyShard(GPT(CONFIG, generator(0, 0, "weights"))))
    path = write_safetensors(tmp_path / f"of rank {dist.get_rank()}", state)
    assert library.load_model(other, path) == (set(), [])
    assert same(other.state_dict(), model.state_dict())
    assert same(read_safetensors(path), model.state_dict())
    library.save_model(model, path.with_name("theirs"))
    assert same(read_safetensors(path.with_name("theirs")), model.state_dict())


def test_nothing_is_overwritten_and_what_is_odd_or_damaged_is_refused(tmp_path):
    path = write_safetensors(tmp_path, {"weight": torch.rand(2)})
    data = path.read_bytes()
    with pytest.raises(ValueError, match="has model.safetensors already; nothing is overwritten"):
        write_safetensors(tmp_path, {"weight": torch.rand(2)})
    assert path.read_bytes() == data
    row = torch.rand(3)
    for value, words in (
        (row.to(torch.complex128), "complex128"),
        (3, "int"),
        (row[:2], "share memory"),
        (row.to("meta"), "no data"),
    ):
        with pytest.raises(ValueError, match=f"safetensors refuses the state .*{words}"):
            write_safetensors(tmp_path / "other", {"weight": value, "row": row})
    assert sorted(os.listdir(tmp_path)) == [MODEL, "other"]
    for damaged in (b"", (2**62).to_bytes(8, "little"), (2).to_bytes(8, "little") + b"\xff\xff", data[:-1]):
        path.write_bytes(damaged)
        words = "model.safetensors is damaged, or has numbers of a kind that torch has not"
        with pytest.raises(ValueError, match=words):
            read_safetensors(tmp_path)
    six = json.dumps({"w": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    path.write_bytes(len(six).to_bytes(8, "little") + six + bytes(3))
    with pytest.raises(ValueError, match="of a kind that torch has not .*F6_E2M3"):
        read_safetensors(tmp_path)
    with pytest.raises(ValueError, match="gone.* cannot be read"):
        read_safetensors(tmp_path / "gone")
