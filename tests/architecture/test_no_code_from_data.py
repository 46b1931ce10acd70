"""Nothing that comes from a file or a socket becomes code, but where this list says whose it is and why."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = {  # the calls of a file, and why
    "distlab/comm/launch/ranks.py": ({"pickle.loads"}, "a rank's reply, over a pipe that the launcher made"),
    "distlab/comm/launch/worker.py": ({"pickle.loads", "exec", "eval"}, "the launcher's call, and its user's cell"),
    "distlab/course/grading/answer/source.py": ({"exec"}, "a learner's own answer, which they asked to be checked"),
    "distlab/course/grading/mutant.py": ({"exec"}, "an edited reference of this package"),
    "distlab/course/grading/sealed.py": ({"exec"}, "a file of this package"),
}
UNPICKLERS = {"distlab/comm/plain.py"}  # classes that let no name through but those they list
PICKLES = {"pickle", "cloudpickle", "dill", "marshal", "joblib"}
LOADERS = {"load", "loads", "Unpickler"}
WORTH_A_LOOK = re.compile(r"eval|exec|pickle|dill|marshal|joblib|\bload\(|yaml|system|popen|getoutput|getstatus|shell")
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}


def name_of(node):
    """Return "a.b" of a name or attribute; what stands before a call's dot is nothing."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def is_dangerous(node):
    """Tell whether a call makes code of data, or hands a line to a shell."""
    name, named = name_of(node.func), {one.arg: one.value for one in node.keywords}
    module, _, method = name.rpartition(".")
    true = {key for key, value in named.items() if isinstance(value, ast.Constant) and value.value is True}
    return any(
        (
            name in ("eval", "exec") or name in SHELLS or "shell" in named,
            module in PICKLES and method in LOADERS,
            name == "torch.load" and "weights_only" not in true,
            name in ("np.load", "numpy.load") and "allow_pickle" in true,
            name in ("yaml.load", "yaml.full_load", "yaml.unsafe_load"),
        )
    )


def dangers(source):
    """Yield (line, name) of what makes code of data: calls, classes that unpickle, and names imported for that."""
    if not WORTH_A_LOOK.search(source):
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and any(name_of(base).endswith("Unpickler") for base in node.bases):
            yield node.lineno, "Unpickler"
        elif isinstance(node, ast.ImportFrom) and node.module in PICKLES and LOADERS & {one.name for one in node.names}:
            yield node.lineno, f"from {node.module} import"
        elif isinstance(node, ast.Call) and is_dangerous(node):
            yield node.lineno, name_of(node.func)


FILES = sorted(path for part in ("distlab", "simulator") for path in (ROOT / part).rglob("*.py"))


def test_no_file_makes_code_of_data_but_those_that_say_why():
    found = {}
    for path in FILES:
        for line, name in dangers(path.read_text()):
            found.setdefault(str(path.relative_to(ROOT)), []).append((line, name))
    allowed = {file: calls for file, (calls, _) in ALLOWED.items()} | dict.fromkeys(UNPICKLERS, {"Unpickler"})
    wrong = [(file, *one) for file, every in found.items() for one in every if one[1] not in allowed.get(file, ())]
    assert not wrong, f"code from data; read it without, or say in ALLOWED whose it is: {wrong}"
    assert set(allowed) == set(found), "ALLOWED names files that need it no more"


def test_an_unpickler_finds_only_names_that_it_lists():
    """Each overrides find_class: without that it would run what a file names."""
    for file in UNPICKLERS:
        classes = [node for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.ClassDef)]
        unpicklers = [node for node in classes if any(name_of(base).endswith("Unpickler") for base in node.bases)]
        assert unpicklers
        for node in unpicklers:
            assert any(isinstance(one, ast.FunctionDef) and one.name == "find_class" for one in node.body)


DANGERS = """pickle.loads(data); torch.load(path); torch.load(path, weights_only=False); eval(text); exec(text)
np.load(path, allow_pickle=True); os.system(line); subprocess.run(line, shell=True); subprocess.run(line, shell=flag)
class Reader(pickle.Unpickler): pass
yaml.load(text); from pickle import loads"""
PLAIN = "torch.load(p, weights_only=True); np.load(p, allow_pickle=False); json.loads(t); model.eval(); re.compile(t)"


def test_the_gate_sees_each_way_and_lets_plain_readers_pass():
    for source in re.split("; |\n", DANGERS):
        assert list(dangers(source)), source
    assert not list(dangers(PLAIN))


def test_what_a_browser_shows_is_text():
    """Names of spans come from traces of others: no script of ours makes elements of a text."""
    scripts = sorted(path for part in ("distlab", "simulator") for path in (ROOT / part).rglob("*.js"))
    makers = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function")
    assert scripts
    assert [path.name for path in scripts if makers.search(path.read_text())] == []
