"""Wrong ways to look for the newest checkpoint that is whole."""

from distlab.grading import Mutant

_DIFFERS = "not there or hashlib.sha256((path / file).read_bytes()).hexdigest() != digest"

WRONG_NEWESTS = (
    Mutant("tidies up", "returned", "who looks for a checkpoint removes none", 1)
    .edit("damaged += wrong", "damaged += wrong\nshutil.rmtree(path)")
    .setup("import shutil"),
    Mutant("its name", "returned", "expected the checkpoint's path", 1).edit(
        "return path, damaged", "return path.name, damaged"
    ),
    Mutant("SHA-1", "false alarm", "compare with the SHA-256", 1).edit("hashlib.sha256", "hashlib.sha1"),
    Mutant("is it there", "not seen", "one bit is flipped", 1, 44).edit(_DIFFERS, "not there"),
    Mutant("any of the sums", "not seen", "two shards are swapped", 1).edit(
        " != digest", ' not in manifest["files"].values()'
    ),
    Mutant("as text", "not the newest", "the highest number counts", 1).edit("int(found[1])", "found[1]"),
    Mutant("by time", "not the newest", "not a file's time", 1, 70).edit(
        "int(found[1])", "(folder / found[0]).stat().st_mtime"
    ),
    Mutant("no file missing", "raised", "FileNotFoundError", 1).edit(_DIFFERS, _DIFFERS.replace("not there or ", "")),
    Mutant("manifest is whole", "raised", "name what is damaged", 1).edit(
        "except (OSError, ValueError):", "except OSError:"
    ),
    Mutant("step not compared", "not seen", "copied over", 1).edit(
        'manifest["step"] != int(name[1])', 'manifest["step"] is None'
    ),
    Mutant("eight digits", "not seen", "two are damaged", 1).edit(
        "hexdigest() != digest", "hexdigest()[:8] != digest[:8]"
    ),
    Mutant("newest or none", "gave up", "is whole", 1).edit("damaged += wrong", "return None, wrong"),
    Mutant("first one named", "names", "Name each damaged file", 1).edit("damaged += wrong", "damaged += wrong[:1]"),
    Mutant("older ones too", "names", "that are newer than step-100", 1)
    .edit("damaged = []", "damaged, best = [], None")
    .edit("return path, damaged", "best = best or path\ncontinue")
    .edit("return None, damaged", "return best, damaged"),
    Mutant("half a name", "names", "Name each damaged file", 1).edit(
        'wrong.append(f"{path.name}/{file}")', "wrong.append(file)"
    ),
    Mutant("any name", "names", "got step-110/manifest.json", 1).edit("re.fullmatch", "re.match"),
)
