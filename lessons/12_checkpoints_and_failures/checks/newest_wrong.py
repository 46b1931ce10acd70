"""Wrong ways to look for the newest checkpoint that is whole."""

from distlab.grading import Mutant

_DIFFERS = "not there or hashlib.sha256((path / file).read_bytes()).hexdigest() != digest"
_ENDS = "ends it with an error; name what is damaged, and take an older one"

WRONG_NEWEST = (
    Mutant(
        "tidies up",
        "folder changed",
        "it changes the folder; who looks for a checkpoint removes none, and makes none",
        1,
    )
    .edit("damaged += wrong", "damaged += wrong\nshutil.rmtree(path)")
    .setup("import shutil"),
    Mutant(
        "its name", "name for a path", "it returns a name; the checkpoint's path is expected, folder / name", 1
    ).edit("return path, damaged", "return path.name, damaged"),
    Mutant("SHA-1", "false alarm", "it calls what is whole damaged; compare the SHA-256 of the bytes, in hex", 1).edit(
        "hashlib.sha256", "hashlib.sha1"
    ),
    Mutant("is it there", "bytes not seen", "a file that is there may be damaged: compare its SHA-256", 1, 44).edit(
        _DIFFERS, "not there"
    ),
    Mutant(
        "any of the sums", "swap not seen", "two files that are swapped count as whole: compare each with its own", 1
    ).edit(" != digest", ' not in manifest["files"].values()'),
    Mutant("as text", "sorted as text", "names are compared as text; the highest number counts", 1).edit(
        "int(found[1])", "found[1]"
    ),
    Mutant("by time", "by time", "it goes by a file's time; the highest number counts, not a file's time", 1, 70).edit(
        "int(found[1])", "(folder / found[0]).stat().st_mtime"
    ),
    Mutant("no file missing", "missing file", f"a missing file {_ENDS}", 1).edit(
        _DIFFERS, _DIFFERS.replace("not there or ", "")
    ),
    Mutant("manifest is whole", "manifest cut off", f"a manifest that is cut off {_ENDS}", 1).edit(
        "except (OSError, ValueError):", "except OSError:"
    ),
    Mutant(
        "step not compared", "copy not seen", "a copy of a different step is not seen: compare the manifest's step", 1
    ).edit('manifest["step"] != int(name[1])', 'manifest["step"] is None'),
    Mutant("eight digits", "a part compared", "the first digits of a SHA-256 are compared; all of them count", 1).edit(
        "hexdigest() != digest", "hexdigest()[:8] != digest[:8]"
    ),
    Mutant(
        "newest or none", "gave up", "it gives up when the newest is damaged; an older one that is whole counts", 1
    ).edit("damaged += wrong", "return None, wrong"),
    Mutant("first one named", "one named", "one damaged file of a checkpoint is named; name each damaged file", 1).edit(
        "damaged += wrong", "damaged += wrong[:1]"
    ),
    Mutant(
        "older ones too", "older named", "name damage in checkpoints newer than the one returned, not in older ones", 1
    )
    .edit("damaged = []", "damaged, best = [], None")
    .edit("return path, damaged", "best = best or path\ncontinue")
    .edit("return None, damaged", "return best, damaged"),
    Mutant(
        "half a name", "half a name", "a file is named without its checkpoint; its name is such as step-40/rank-1.pt", 1
    ).edit('wrong.append(f"{path.name}/{file}")', "wrong.append(file)"),
    Mutant("any name", "any name", "a folder that only begins as step-N is no checkpoint: re.fullmatch", 1).edit(
        "re.fullmatch", "re.match"
    ),
    Mutant(
        "oldest first", "oldest first", "the oldest checkpoint's damage is named first; the newest one's comes first", 1
    ).edit("damaged += wrong", "damaged = wrong + damaged"),
    Mutant("passed over", "passed over", "a damaged manifest is passed over: name step-N/manifest.json", 1).edit(
        'damaged.append(f"{path.name}/manifest.json")', "pass"
    ),
)
