import tomllib
from pathlib import Path

import pytest

import simulator

PRESETS = Path(simulator.__file__).parent / "hardware" / "presets.toml"


@pytest.mark.parametrize("measured", [True, False])
def test_every_preset_loads(measured):
    for name in simulator.names("devices"):
        assert simulator.device(name, measured=measured).name == name
    for name in simulator.names("links"):
        assert simulator.link(name, measured=measured).protocols
    for name in simulator.names("clusters"):
        assert simulator.cluster(name, measured=measured).num_devices >= 1


def test_every_figure_has_a_source_with_a_year_or_says_that_it_has_none():
    presets = tomllib.loads(PRESETS.read_text(encoding="utf-8"))
    for row in [*presets["devices"].values(), *presets["links"].values()]:
        for part in (row, row.get("measured")):
            if part is not None:
                assert "20" in part["source"] or "no data sheet" in part["source"]


def test_measured_is_below_the_data_sheet():
    for name in simulator.names("devices"):
        achieved = simulator.device(name).matmul_flops_per_s
        assert achieved <= simulator.device(name, measured=False).matmul_flops_per_s


@pytest.mark.parametrize("load", [simulator.device, simulator.link, simulator.cluster])
def test_an_unknown_preset_lists_those_that_exist(load):
    with pytest.raises(ValueError, match=r"no preset 'abacus' among the \w+; choose one of .*"):
        load("abacus")


def test_an_unknown_table_lists_the_tables():
    with pytest.raises(ValueError, match="devices, links, clusters"):
        simulator.names("planets")


def test_a_cluster_fills_its_nodes():
    assert simulator.cluster("dgx-h100", 64).num_devices == 64
    with pytest.raises(ValueError, match="do not fill nodes of 8"):
        simulator.cluster("dgx-h100", 12)


def test_every_device_is_in_a_cluster_and_every_cluster_has_a_stack():
    """All but a TPU, whose wires are no links between two, and this machine, which is calibrated."""
    clusters = tomllib.loads(PRESETS.read_text(encoding="utf-8"))["clusters"]
    used = {row["device"] for row in clusters.values()}
    assert set(simulator.names("devices")) - used == {"tpu-v3"}
    assert [name for name, row in clusters.items() if "stack" not in row] == ["laptop"]


@pytest.mark.parametrize(
    ("name", "cards", "card_bytes_per_s"),
    [
        ("dgx-a100", 8, 25e9),
        ("dgx-h100", 8, 50e9),
        ("dgx-b200", 8, 50e9),
        ("dgx-v100", 4, 12.5e9),
        ("dgx-1-p100", 4, 12.5e9),
    ],
)
def test_devices_of_a_node_share_the_cards_of_its_data_sheet(name, cards, card_bytes_per_s):
    node = simulator.cluster(name, stack="best-case")
    each = node.inter_node.protocols[-1].bytes_per_s
    assert each * node.devices_per_node == cards * card_bytes_per_s
