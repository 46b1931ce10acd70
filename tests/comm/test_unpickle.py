"""A pickle from anyone is read by a list of names: no code of it runs, and damage is told in words."""

import io
import os
import pickle
import sys

import pytest

from distlab.comm.plain import restricted_load


class _Runs:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


def _read(data, allowed=()):
    return restricted_load(io.BytesIO(data), dict(allowed), "file.pt")


def test_plain_values_need_no_names():
    value = {"a": [1, 2.5, None, True], "b": ("x", b"y"), 3: {4, 5}}
    for protocol in (4, 5):
        assert _read(pickle.dumps(value, protocol)) == value
    for protocol in range(4):  # bytes and sets ask for names there
        assert _read(pickle.dumps({"a": [1, ("x",)]}, protocol)) == {"a": [1, ("x",)]}


def test_a_name_stands_for_what_the_list_has():
    data = pickle.dumps(_Runs(os.path.join, ("a", "b")))
    assert _read(data, {("posixpath", "join"): lambda *parts: "+".join(parts)}) == "a+b"


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_code_is_refused_before_it_is_looked_up_and_does_not_run(tmp_path, protocol):
    touched = tmp_path / "touched"
    data = pickle.dumps(_Runs(os.system, (f"touch {touched}",)), protocol)
    with pytest.raises(ValueError, match=r"file\.pt was not loaded: it asks for posix\.system, which is not allowed"):
        _read(data, {("collections", "OrderedDict"): dict})
    assert not touched.exists()


def test_a_module_that_is_not_listed_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "runs_when_imported.py").write_text("raise SystemExit('it was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"it asks for runs_when_imported\.anything"):
        _read(b"crun_\n".replace(b"run_", b"runs_when_imported") + b"anything\n.")
    assert "runs_when_imported" not in sys.modules


def test_attributes_of_a_listed_object_are_names_of_their_own():
    data = b"\x80\x04\x8c\x05torch\x8c\x0bSize.mro.im\x93."
    with pytest.raises(ValueError, match=r"asks for torch\.Size\.mro\.im"):
        _read(data, {("torch", "Size"): tuple})


@pytest.mark.parametrize("extension", [b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\x00\x00\x00"])
def test_the_registry_of_extensions_opens_no_other_way(extension):
    with pytest.raises(ValueError, match=r"file\.pt"):
        _read(b"\x80\x02" + extension + b".")


@pytest.mark.parametrize("cut", range(0, 40, 3))
def test_damage_is_told_in_words(cut):
    data = pickle.dumps({"names": ["one", "two", "three"], "sizes": (1, 2, 3)})
    with pytest.raises(ValueError, match=r"file\.pt (is damaged|was not loaded)"):
        _read(data[:cut])
