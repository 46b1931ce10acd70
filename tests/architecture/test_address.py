"""The project's addresses stand in pyproject.toml alone, and what GitHub reads is what it expects."""

import re
import runpy
import shutil
import tomllib
from pathlib import Path
from unittest import mock

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()
SCHEMAS = {
    "vendor.github-workflows": ".github/workflows/*.yml",
    "custom.github-workflows-require-timeout": ".github/workflows/*.yml",
    "vendor.github-issue-forms": ".github/ISSUE_TEMPLATE/*.yml",
    "vendor.citation-file-format": "CITATION.cff",
}


@pytest.mark.parametrize("address", ["", "https://example.org/us", "https://example.org/us/", "http://example.org/us"])
def test_a_packages_page_has_links_of_its_own_until_the_address_is_known(address, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "README.md", tmp_path)
    Path("pyproject.toml").write_text(re.sub(r"(?m)^(repository|website) = .*", rf'\1 = "{address}"', PROJECT))
    with mock.patch("setuptools.setup") as setup:
        if address not in ("", "https://example.org/us"):
            with pytest.raises(SystemExit, match=f"repository = '{address}': begin with https:// and end without"):
                runpy.run_path(str(ROOT / "setup.py"))
            return
        runpy.run_path(str(ROOT / "setup.py"))
    page = setup.call_args.kwargs
    links = re.findall(r"\]\(([^)]+)\)", page["long_description"])
    assert [all(link.startswith("https://") for link in links), bool(page["project_urls"])] == [bool(address)] * 2


def test_no_file_says_a_different_address():
    said = tomllib.loads(PROJECT)
    cited = dict(re.findall(r"(?m)^([a-z-]+): (.+)", (ROOT / "CITATION.cff").read_text()))
    own = [said["tool"]["distlab"][name] for name in ("repository", "website")]
    assert [cited.get("repository-code", ""), cited.get("url", "")] == own
    assert (cited["version"], said["project"]["dynamic"]) == (said["project"]["version"], ["readme", "urls"])
    pages = [page for part in ("*.md", "docs/*.md", "lessons/*.md", ".github/**/*.*") for page in ROOT.glob(part)]
    found = {link for page in pages for link in re.findall(r"https://[^\s)\"]*/distlab\b[^\s)\"]*", page.read_text())}
    owner = own[0].removeprefix("https://github.com") or "no address yet"
    assert [link for link in found if owner not in link and not link.startswith(own[1] or owner)] == []


@pytest.mark.parametrize(("schema", "files"), SCHEMAS.items())
def test_github_reads_it(schema, files):
    check = pytest.importorskip("check_jsonschema", reason="check-jsonschema, of the extra test, has GitHub's schemas")
    assert check.main(["--builtin-schema", schema, *map(str, ROOT.glob(files))], standalone_mode=False) == 0
