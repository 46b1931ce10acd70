"""A lab on this backend."""

from distlab.cli import main


def test_a_lab_runs_on_this_backend(capsys):
    lab = ["lab", "02", "--ranks", "2", "--backend", "shared", "--limit-s", "100", "--blocks", "1"]
    status, said = main(lab), capsys.readouterr()
    assert status == 0, said
    assert "--backend shared" in said.out, "the plain command says it too"
    assert "on 2 ranks, cpu, shared; functions: reference" in said.out
