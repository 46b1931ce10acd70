"""The capstone on real ranks: bytes that leave a node as counted by hand, and a whole attempt through a kill."""

from __future__ import annotations

import pytest

from distlab.comm import Ranks
from distlab.course.capstone import (
    BATCH,
    FIRST_PLAN,
    MODEL,
    NODES,
    NUM_RANKS,
    attempt,
    first_entry,
    new_model,
    read_entry,
    read_log,
    train,
    train_alone,
)

pytestmark = pytest.mark.timeout(900)
PIPELINE = 'pipeline = 2\ndata = 4\nnum_microbatches = 2\norder = ["pipeline", "data", "expert", "context", "tensor"]\n'


@pytest.fixture
def pipeline(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(FIRST_PLAN.replace("data = 8\nnum_microbatches = 1\n", PIPELINE))
    return read_entry(path, 1)


def test_what_crosses_the_nodes(pipeline, tmp_path):
    gradients = sum(4 * parameter.numel() for parameter in new_model().parameters())
    activations = BATCH * MODEL.context * MODEL.hidden_size * 4 // 4  # of one of four replicas
    alone = train_alone(2)
    with Ranks(NUM_RANKS, nodes=NODES, timeout_s=300) as ranks:
        for entry, wanted in ((first_entry(), gradients / 4), (pipeline, activations)):
            folder = tmp_path / entry.text
            folder.mkdir()
            assert max(ranks.run(train, entry, folder, 2)) == pytest.approx(wanted, rel=0.01)
            assert [update.loss for update in read_log(folder)] == pytest.approx(alone, rel=1e-5)


@pytest.mark.soak
def test_an_attempt_through_a_kill(pipeline):
    verdict = attempt(pipeline, seed=3)
    assert 0 <= verdict.repeated <= 1
    assert verdict.loss_error < 1e-5
    assert verdict.sent_bytes <= 300e3
