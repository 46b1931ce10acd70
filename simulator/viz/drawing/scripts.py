"""The part of a widget's script that all widgets with controls share."""

from pathlib import Path

NAMES = Path(__file__).with_name("name_controls.js")  # nameControls(el): names for a screen reader
