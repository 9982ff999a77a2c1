"""Looks into a wheel and an sdist that are about to be released: python tests/release.py DIST."""

from __future__ import annotations

import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEEDED = (
    "privtune/py.typed",
    "privtune/tasks/digits-demo.yaml",
    "privtune/ledger/certificate.html",
    "privtune/views/templates/study.html",
)


def problems(dist: Path) -> list[str]:
    """Return what is wrong with the two files of a folder, a sentence each."""
    wheels, sdists = sorted(dist.glob("*.whl")), sorted(dist.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sdists) != 1:
        return [f"{dist} holds {len(wheels)} wheels and {len(sdists)} sdists, not one of each"]
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = set(wheel.namelist())
        [metadata] = (wheel.read(name) for name in names if name.endswith(".dist-info/METADATA"))
    with tarfile.open(sdists[0]) as sdist:
        packed = {name.partition("/")[2] for name in sdist.getnames()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    there = {str(p.relative_to(ROOT)) for p in (ROOT / "privtune").rglob("*.py")}
    said = message_from_bytes(metadata)
    wrong = [f"the wheel lacks {name}" for name in sorted({*NEEDED, *there} - names)]
    wrong += [
        f"the sdist lacks {name}" for name in sorted({*there, "LICENSE", "CHANGELOG.md"} - packed)
    ]
    wrong += [
        f"the wheel holds {name}, which is no part of the package"
        for name in sorted(names)
        if not name.startswith(("privtune/", f"privtune-{project['version']}.dist-info/"))
        or "__pycache__" in name
    ]
    kept = (".db", ".pem", ".key", ".sqlite", ".certificate.json")
    wrong += [f"{name} is packed" for name in sorted(names | packed) if name.endswith(kept)]
    if (said["Version"], said["Requires-Python"]) != (
        project["version"],
        project["requires-python"],
    ):
        wrong.append(f"the wheel says version {said['Version']}, Python {said['Requires-Python']}")
    return wrong


def main() -> None:
    """Exit with the problems, if there are any."""
    found = problems(Path(sys.argv[1]))
    sys.exit("\n".join(found) or 0)  # an empty text would be exit 1


if __name__ == "__main__":
    main()
