"""Fully sharded parameters (ZeRO-3, FSDP): whole only while their unit is at work. Begin with `flat_unit`."""
