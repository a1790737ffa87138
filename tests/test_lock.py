"""Tests that uv.lock matches pyproject.toml and names only the public package index."""

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOCK = (ROOT / "uv.lock").read_text(encoding="utf-8")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_lock_has_the_requirements_of_the_project() -> None:
    lock = tomllib.loads(LOCK)
    (locked,) = (package for package in lock["package"] if package["name"] == PROJECT["name"])
    found = set()
    for one in locked["metadata"]["requires-dist"]:
        own = f"[{','.join(one['extras'])}]" if "extras" in one else ""
        found.add((one["name"] + own + one["specifier"], one.get("marker", "")))
    extras = PROJECT["optional-dependencies"].items()
    expected = {(one, "") for one in PROJECT["dependencies"]}
    for extra, requirements in extras:
        for requirement, semicolon, marker in (one.partition("; ") for one in requirements):
            expected.add((requirement, f"{marker}{' and ' if semicolon else ''}extra == '{extra}'"))
    assert found == expected, "the requirements have changed: run 'uv lock'"
    assert lock["requires-python"] == PROJECT["requires-python"]


def test_the_lock_names_only_the_public_index() -> None:
    addresses = set(re.findall(r"[a-z]+://[^/\"]*", LOCK))
    assert addresses == {"https://pypi.org", "https://files.pythonhosted.org"}
