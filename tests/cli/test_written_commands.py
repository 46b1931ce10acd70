"""Every command that README, START and the lessons show is one that the command line takes."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from distlab.cli import COMMANDS, parser
from distlab.cli.course import find_lab, load_settings
from distlab.cli.flags import ONLY_IN_FILES
from distlab.course.lab.settings import parser_of
from distlab.plan import Plan, Precision, Sharding
from simulator import ClusterDescription, ModelDescription

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [ROOT / "README.md", ROOT / "lessons" / "START.py", *sorted(ROOT.glob("lessons/[0-9][0-9]_*/lesson.py"))]
TEXTS += sorted(ROOT.glob("lessons/*.md"))
PROGRAMS = ("distlab ", "torchrun ")
# A pattern of commands, or a command that a sentence speaks of; train.py stands for the reader's own script.
USAGE = re.compile(r"\.\.\.|\[|NN|NAME|\||^distlab (lab|profile)$|^torchrun( --[a-z-]+)?$| train\.py$")


def written(text: str) -> list[str]:
    """Return the commands of a text: whole lines of code, and code spans."""
    plain = re.sub(r"^# ?", "", text, flags=re.MULTILINE)  # markdown in a lesson's source is a comment
    spans = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", plain)
    return [line.strip() for line in (*plain.splitlines(), *spans) if line.startswith(PROGRAMS)]


def examples() -> list[str]:
    found = {command for path in TEXTS for command in written(path.read_text(encoding="utf-8"))}
    return sorted(command for command in found if not USAGE.search(command))


def take(command: str) -> None:
    """Parse a command as the program would; a mistake is a SystemExit."""
    program, *words = shlex.split(command, comments=True)
    if program == "torchrun":
        script = next(word for word in words if word.endswith(".py"))
        assert (ROOT / script).is_file(), f"{command}: no {script} in the repository's root"
        number, flags = Path(script).parent.name[:2], words[words.index(script) + 1 :]
    elif words[0] == "lab":
        number, flags = words[1], words[2:]
    else:
        try:
            parser().parse_args(words)
        except SystemExit as end:
            if end.code != 0 or "--help" not in words:
                raise
        return
    number, path = find_lab(number)
    lab = parser_of(load_settings(number, path), f"distlab lab {number}")
    lab.add_argument("--ranks", type=int)
    lab.parse_args(flags)


def test_every_written_command_is_taken_and_a_wrong_one_refused():
    for command in examples():
        take(command)
    for command in ("distlab labs 03", "distlab lab 03 --rank 4", "distlab lesson begin"):
        with pytest.raises(SystemExit):
            take(command)
    assert len([command for command in examples() if "--impl mine" in command]) >= 11
    usages = written((ROOT / "README.md").read_text(encoding="utf-8"))
    assert {usage.split()[1] for usage in usages if usage.startswith("distlab ")} <= set(COMMANDS)


def test_a_file_that_a_command_reads_is_there():
    """It is in the repository, or a line before has made it: `... > my_order.txt`, `--new plan.toml`."""
    for path in TEXTS:
        made: set[str] = set()
        for line in re.sub(r"^# ?", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE).splitlines():
            made |= set(re.findall(r"(?:> |--new )(\S+\.\w+)", line))
            if line.startswith("distlab ") and not USAGE.search(line):
                files = [word for word in shlex.split(line, comments=True) if word.endswith((".txt", ".toml"))]
                assert not [name for name in files if name not in made and not (ROOT / name).is_file()], (path, line)


def test_the_readme_says_how_to_reach_the_commands():
    venv = re.search(r"^VENV := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert f"\n. {venv[1]}/bin/activate\n" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"`. {venv[1]}/bin/activate`" in (ROOT / "lessons" / "START.py").read_text(encoding="utf-8")


def test_every_key_of_a_plan_file_has_a_flag_or_is_only_in_files():
    """Each flag's help is what the record says of the field, with the names that it may have."""
    subparsers = next(action for action in parser()._actions if action.dest == "command")
    help_of = {action.dest: action.help for action in subparsers.choices["simulate"]._actions}
    records = {"workload": ModelDescription, "cluster": ClusterDescription, "plan": Plan}
    records |= {"plan.sharding": Sharding, "plan.precision": Precision}
    paths = {f"{table}.{each.name}" for table, kind in records.items() for each in fields(kind)} - set(records)
    left = {path for path in paths if path.rpartition(".")[2] in ONLY_IN_FILES}
    assert paths - left == {path for path in help_of if "." in path} - {"plan.order"}
    assert all(help_of[path] for path in paths - left)
    for name in ("one_f_one_b", "dualpipe_v", "(default one_f_one_b)"):
        assert name in help_of["plan.schedule"]
    assert help_of["workload.head_size"].endswith(" (default: h over heads)")
