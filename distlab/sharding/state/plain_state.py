"""Read the state of a plain torch optimizer of the whole model: it knows parameters by numbers, not by names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

State = dict[str, dict[str, Any]]


def by_names(state_dict: Mapping[str, Any], names: Sequence[Sequence[str]]) -> tuple[State, list[dict[str, Any]]]:
    """Return an optimizer's state and its groups by the names of parameters.

    Args:
        state_dict: of a plain optimizer (parameters by numbers), or of a sharded one (by names already).
        names: of the parameters in each group, in the order in which the plain optimizer was given them.

    Raises:
        ValueError: the state has other groups, groups of other sizes, or lacks a name.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError("this is not an optimizer's state (no 'state' and 'param_groups'); pass its state_dict()")
    groups = state_dict["param_groups"]
    sizes, expected = [len(group["params"]) for group in groups], [len(group) for group in names]
    if sizes != expected:
        raise ValueError(
            f"the saved optimizer has groups of {sizes} parameters, and this one of {expected}; build it as it was "
            "when the state was saved"
        )
    places = {}
    for group, own in zip(groups, names, strict=True):
        for given, name in zip(group["params"], own, strict=True):
            places[given] = given if isinstance(given, str) else name
            if isinstance(given, str) and given not in state_dict["state"]:
                raise ValueError(f"the full state has nothing for {given}; load the state of this model")
    state = {places.get(key, str(key)): dict(kept) for key, kept in state_dict["state"].items()}
    named = [
        {
            **{key: group[key] for key in group if key not in ("params", "param_names")},
            "names": [places[one] for one in group["params"]],
        }
        for group in groups
    ]
    return state, named


def kept_once(state: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Return the keys of which an optimizer keeps one value per tensor, such as the number of steps.

    Shapes: moments in their parameter's shape; what is kept once, []
    """
    moments = {
        key
        for name, kept in state.items()
        for key, value in kept.items()
        if isinstance(value, Tensor) and key != "step" and tuple(value.shape) == shapes.get(name)
    }
    return {key for kept in state.values() for key in kept} - moments
