"""Groups under torchrun and alone, the environment's errors, and mesh groups."""

import json
import os
import socket

import psutil
import pytest
import torch
import torch.distributed as dist

from distlab.comm import choose_backend, device, entry, mesh_groups, process_group
from distlab.comm.rendezvous import Address, make_store, read_environment
from distlab.plan import Mesh

WORLD = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}


@pytest.fixture
def alone(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("RANK", "WORLD_", "LOCAL_", "MASTER_", "TORCHEL"))]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": None}, "RANK is not set; start the script with torchrun"),
        ({"RANK": "one"}, "RANK='one' is not a whole number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 is too small; it is at least 1"),
        ({"RANK": "2"}, "RANK=2 does not fit WORLD_SIZE=2: ranks are 0 to 1"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK=1 does not fit LOCAL_WORLD_SIZE=1"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999 is not a port"),
        ({"TORCHELASTIC_RESTART_COUNT": "x"}, "TORCHELASTIC_RESTART_COUNT='x' is not a whole number"),
    ],
)
def test_an_environment_that_cannot_be_is_refused_in_one_sentence(changes, message):
    environment = {name: value for name, value in (WORLD | changes).items() if value is not None}
    with pytest.raises(ValueError, match=message) as caught:
        read_environment(environment)
    assert "\n" not in str(caught.value)


def alone_in_a_group():
    with process_group() as member:
        assert (member.rank, member.world_size, member.device) == (0, 1, torch.device("cpu"))
        dist.all_reduce(torch.ones(2), group=member.group)
        listening = [c for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
        assert all(c.laddr.ip in ("127.0.0.1", "::1") for c in listening)
        with pytest.raises(RuntimeError, match="in a process group already"), process_group():
            pass
        raise KeyError("mine")


def test_without_an_environment_this_is_the_only_rank_and_its_group_is_destroyed_after_an_error(alone):
    with pytest.raises(KeyError, match="mine"):
        alone_in_a_group()
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, "device is 'gpu'"),  # the others are refused as by `run`
        pytest.param(
            *({"device": "cuda"}, "torch sees no GPU; pass 'cpu'"),
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_arguments_that_cannot_be_are_refused(alone, options, message):
    with pytest.raises(ValueError, match=message), process_group(**options):
        pass
    assert not dist.is_initialized()


@pytest.fixture
def port():
    """A port that a different program has taken; bound, and nobody listens there until somebody asks for it."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        yield other


def address_at(other, **changes) -> Address:
    return read_environment(WORLD | {"MASTER_PORT": str(other.getsockname()[1])} | changes)


def test_a_port_that_is_taken_is_told(port):
    port.listen()
    with pytest.raises(RuntimeError, match=r"port \d+ on 127.0.0.1 is taken by a different program; set MASTER_PORT"):
        make_store(address_at(port), 5)


def test_a_master_that_does_not_answer_is_told(port):
    with pytest.raises(RuntimeError, match="rank 1: no process answers at 127.0.0.1:.* is rank 0 running"):
        make_store(address_at(port, RANK="1"), 1)
    with pytest.raises(ValueError, match="MASTER_ADDR='no.such.host.invalid' is not a known address"):
        make_store(address_at(port, MASTER_ADDR="no.such.host.invalid"), 1)


def test_rank_0_s_store_listens_on_loopback_only(port):
    address = address_at(port)
    port.close()
    store = make_store(address, 5)
    connections = psutil.Process().net_connections()
    assert {c.laddr.ip for c in connections if c.laddr and c.laddr.port == address.master_port} == {"127.0.0.1"}
    del store


def test_one_machine_is_told_from_several():
    def place(**changes: str) -> Address:
        return read_environment(WORLD | changes)

    assert place().is_on_one_machine
    assert place(MASTER_ADDR="node7").is_on_one_machine, "every rank is local"
    assert place(LOCAL_WORLD_SIZE="1", LOCAL_RANK="0").is_on_one_machine, "several launchers on loopback"
    assert not place(MASTER_ADDR="10.0.0.7", LOCAL_WORLD_SIZE="1", LOCAL_RANK="0").is_on_one_machine


def test_the_cpu_is_chosen_without_a_gpu_and_gloo_without_a_gpu_each(monkeypatch):
    monkeypatch.setattr(device, "is_available", lambda: False)
    assert choose_backend(2) == "cpu"
    monkeypatch.setattr(device, "is_available", lambda: True)
    monkeypatch.setattr(device, "num_gpus", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert choose_backend(2) == "cpu:gloo,cuda:nccl"
    assert choose_backend(3) == "gloo", "it moves tensors of a GPU that ranks share"
    assert choose_backend(2, on_cpu=True) == "cpu"


def reach(axes: dict[str, int]) -> dict[str, list[int]]:
    """The ranks whose numbers arrive through the group of each axis."""
    groups = mesh_groups(Mesh(axes))
    found = {}
    for axis, group in groups.items():
        numbers = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
        dist.all_gather(numbers, torch.tensor([dist.get_rank()]), group=group)
        found[axis] = [int(number) for number in numbers]
        dist.destroy_process_group(group)
    return found


AXES = ({"data": 2, "tensor": 2}, {"pipeline": 4, "data": 1}, {"data": 4})


def reach_all() -> list[dict[str, list[int]]]:
    with pytest.raises(ValueError, match="has 3 places and there are 4 ranks"):
        mesh_groups(Mesh({"data": 3}))
    return [reach(axes) for axes in AXES]


def test_a_group_for_each_axis(ranks):
    for rank, found in enumerate(ranks(4).run(reach_all)):
        assert found == [{axis: list(Mesh(axes).group_of(rank, axis)) for axis in axes} for axes in AXES]


def test_the_reason_of_a_failure_is_written_for_torchrun(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    @entry
    def main():
        return 1 / 0

    with pytest.raises(ZeroDivisionError):
        main()
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]
    said = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert said == "ZeroDivisionError: division by zero"
