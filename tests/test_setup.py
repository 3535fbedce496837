"""What the package says of itself is true without the files beside it."""

import re
import subprocess
import sys

import shardmap as sm
from tests.command_line import ROOT


def metadata(*names):
    result = subprocess.run(
        [sys.executable, "setup.py", "-q", *(f"--{name}" for name in names)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    return result.stdout


def test_links_of_the_long_description_work_on_an_index_page():
    text = metadata("long-description")
    assert [
        link for link in re.findall(r"\]\((.*?)\)", text) if "://" not in link
    ] == []
    readme = (ROOT / "README.md").read_text()
    assert "](docs/old.md)" in readme
    assert "](docs/old.md)" not in text


def test_the_version_is_the_packages():
    assert metadata("name", "version").split() == ["shardmap", sm.__version__]


def test_the_files_that_readme_links_to_are_there():
    readme = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", readme)
    missing = [
        link for link in links if "://" not in link and not (ROOT / link).exists()
    ]
    assert len(links) >= 6
    assert missing == []
