"""The capstone: what a plan must be, what is counted, the class's table, and what crosses the nodes on real ranks."""

import json

import pytest

from distlab.cli import main
from distlab.comm import Ranks
from distlab.comm.nodes.wire import NodePlacement
from distlab.course import capstone
from distlab.course.capstone import FIRST_PLAN, CapstoneVerdict, add_row, read_board, read_entry, table

PIPELINE = """
pipeline = 2
data = 4
num_microbatches = 2
order = ["pipeline", "data", "expert", "context", "tensor"]
"""
KEPT = CapstoneVerdict("data 8", 1, 0.8, 0.7, 200_000, 2, 5.0, 1e-6)


def plan(folder, text):
    path = folder / "plan.toml"
    path.write_text(text)
    return path


def test_the_first_plan_is_written_once_and_can_be_read(tmp_path, capsys):
    path = tmp_path / "plan.toml"
    assert main(["capstone", "--new", str(path)]) == 0
    assert read_entry(path, 4).text == "data 8, 1 micro-batches, save every 4"
    assert main(["capstone", "--new", str(path)]) == 2, "it would write over a learner's plan"
    said = capsys.readouterr()
    assert f"wrote {path}" in said.out
    assert str(path) in said.err


REFUSED = [
    ("data = 8", "data = 4", "num_devices = 8"),
    ("num_devices = 8", "num_devices = 4", "8"),
    ("microbatch_size = 4\n", "microbatch_size = 8\n", "make 64; the batch has 32: write microbatch_size = 4"),
    ("num_layers = 4", "num_layers = 2", "a different model"),
    ("data = 8", "dp = 8", "did you mean 'data'"),
    ("num_microbatches = 1", "num_microbatches = 3", "fewer replicas or micro-batches"),
]


def test_a_plan_that_is_none_is_refused_in_one_line_and_a_right_one_says_its_order(tmp_path, capsys):
    for before, after, words in REFUSED:
        assert before in FIRST_PLAN
        path = plan(tmp_path, FIRST_PLAN.replace(before, after))
        assert main(["capstone", str(path)]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert words in said
    path = plan(tmp_path, FIRST_PLAN.replace("data = 8\nnum_microbatches = 1\n", PIPELINE))
    assert read_entry(path, 3).text == "pipeline 2 x data 4, 2 micro-batches, save every 3"
    with pytest.raises(ValueError, match="from 1 to 24"):
        read_entry(path, 0)


def test_bytes_that_leave_the_node():
    for op, members, num_bytes, out in (
        ("all_reduce", range(8), 4096, 1024),  # a quarter of the sum, half of it each way, twice
        ("reduce_scatter", range(8), 4096, 512),
        ("all_gather", range(8), 4096, 4096),
        ("all_reduce", range(4), 4096, 0),
        ("all_reduce", (0, 4), 4096, 4096),
    ):
        assert NodePlacement.of(tuple(members), 0, 4).bytes_out(op, num_bytes) == out


def test_the_board_keeps_the_best_try_of_each_and_no_formula(tmp_path, capsys):
    board = tmp_path / "class.csv"
    for name, verdict in (
        ("ada", KEPT._replace(time=0.95)),
        ("ada", KEPT),
        ("=eve()", KEPT._replace(time=0.5, sent_bytes=10**6)),
        ("bob", KEPT._replace(time=0.7)),
    ):
        add_row(board, name, verdict)
    rows = read_board(board)
    assert [(row.name, row.kept) for row in rows] == [("bob", True), ("ada", True), ("'=eve()", False)]
    assert (rows[1].time, main(["capstone", "--board", str(board)])) == (0.8, 0)
    assert capsys.readouterr().out.strip() == table(rows).strip()
    board.write_text("something,else\n")
    assert main(["capstone", "--board", str(board)]) == 2
    assert "line 1: 'something,else' is not an attempt" in capsys.readouterr().err


def test_each_bar_has_its_sentence():
    assert KEPT.is_kept
    for change in ({"time": 1.1}, {"sent_bytes": 400_000}, {"repeated": 4}, {"loss_error": 0.01}):
        assert len([line for line, is_kept in KEPT._replace(**change).lines() if not is_kept]) == 1
    assert json.loads(json.dumps(KEPT._asdict()))["time"] == 0.8


@pytest.fixture
def pipeline(tmp_path):
    return read_entry(plan(tmp_path, FIRST_PLAN.replace("data = 8\nnum_microbatches = 1\n", PIPELINE)), 1)


@pytest.mark.timeout(900)
def test_what_crosses_the_nodes(pipeline, tmp_path):
    gradients = sum(4 * parameter.numel() for parameter in capstone.new_model().parameters())
    model = capstone.MODEL
    activations = capstone.BATCH * model.context * model.hidden_size * 4 // 4  # of one of four replicas
    alone = capstone.train_alone(2)
    with Ranks(capstone.NUM_RANKS, nodes=capstone.NODES, timeout_s=300) as ranks:
        for entry, wanted in ((capstone.first_entry(), gradients / 4), (pipeline, activations)):
            folder = tmp_path / entry.text
            folder.mkdir()
            assert max(ranks.run(capstone.train, entry, folder, 2)) == pytest.approx(wanted, rel=0.01)
            assert [update.loss for update in capstone.read_log(folder)] == pytest.approx(alone, rel=1e-5)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_an_attempt_through_a_kill(pipeline):
    verdict = capstone.attempt(pipeline, seed=3)
    assert 0 <= verdict.repeated <= 1
    assert verdict.loss_error < 1e-5
    assert verdict.sent_bytes <= 300e3
