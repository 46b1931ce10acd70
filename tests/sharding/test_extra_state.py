"""What modules save beside tensors (`get_extra_state`) is not saved by FullyShard, which says so."""

import pytest
from torch import nn

from distlab.sharding import FullyShard, full_state_dict, load_full_state_dict, sharded_state_dict


class Counts(nn.Linear):
    """Keeps a scale that is no buffer, as quantised layers do."""

    def get_extra_state(self):
        return {"scale": 1.0}

    def set_extra_state(self, state):
        raise AssertionError(state)


def test_an_extra_state_is_refused_in_every_form(ranks):
    def refused():
        model = FullyShard(nn.Sequential(nn.Linear(2, 3), Counts(3, 3)))
        for call in (full_state_dict, sharded_state_dict, lambda one: load_full_state_dict(one, {})):
            with pytest.raises(ValueError, match=r"1 has an extra state .get_extra_state., which shards do not save"):
                call(model)

    ranks(2).run(refused)
