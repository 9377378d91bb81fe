"""Build the kernel package for the Hub, as the `kernels` library loads it: python kernels/build.py [folder]

Writes <folder>/build/torch-<backend>/, a variant per backend of build.toml: the sources, an `_ops.py` with a namespace
of its own, and metadata.json. The same sources give the same bytes. Without a folder: beside this file.
"""

import hashlib
import json
import re
import shutil
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent


def sources(package: str) -> dict[str, str]:
    """The package's modules, by file name."""
    return {path.name: path.read_text() for path in sorted((HERE / "torch-ext" / package).glob("*.py"))}


def digest(files: dict[str, str]) -> str:
    """Ten hexadecimal digits that stand for these files."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:10]


def with_namespace(text: str, namespace: str) -> str:
    """`_ops.py` with another namespace for its operations."""
    text, count = re.subn(r'^NAMESPACE = ".*"$', f'NAMESPACE = "{namespace}"', text, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(
            f'expected one line NAMESPACE = "..." in _ops.py; found {count}. Write it on a line of its own.'
        )
    return text


def build(folder: Path) -> list[Path]:
    """Write every variant below folder / "build", in place of what is there, and return their folders."""
    general = tomllib.loads((HERE / "build.toml").read_text())["general"]
    package = general["name"].replace("-", "_")
    files, variants = sources(package), []
    for backend in general["backends"]:
        name = f"_{package}_{backend}_{digest(files)}"
        variant = folder / "build" / f"torch-{backend}"
        shutil.rmtree(variant, ignore_errors=True)
        variant.mkdir(parents=True)
        for file, text in files.items():
            (variant / file).write_text(with_namespace(text, name) if file == "_ops.py" else text)
        metadata = {
            "id": name,
            "name": general["name"],
            "version": general["version"],
            "license": general["license"],
            "python-depends": [],
            "backend": {"type": backend},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
        variants.append(variant)
    return variants


if __name__ == "__main__":
    for written in build(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE):
        print(written)
