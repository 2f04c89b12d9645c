"""Builds what is released, and tries it: `make release`.

The sdist and the wheel are built from a clean copy of the project and checked: what is in them, and that the wheel
made from the sdist is the same. Then the wheel is installed into an environment of its own for every Python of this
machine that is supported, without and with the extras, and used.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUPPORTED = ("3.11", "3.12", "3.13")
NEEDED = ("rallypoint/py.typed", "rallypoint/backends/etcd/rpc.proto")
USE_BARE = """
import sys
import rallypoint
for name in ("torch", "grpc", "starlette", "prometheus_client", "uvloop"):
    assert name not in sys.modules, name
"""
USE_ALL = """
import rallypoint.backends.etcd, grpc, starlette, uvicorn, prometheus_client, uvloop
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--to", type=Path, default=ROOT / "dist", help="where to put what was built")
    out: Path = parser.parse_args().to.resolve()
    with tempfile.TemporaryDirectory(prefix="rallypoint-release-") as name:
        place = Path(name)
        wheel, sdist = build(place)
        check_contents(wheel, place / "again" / wheel.name)
        for version, python in pythons().items():
            for extras in ("", "[all]"):
                say(f"Python {version}, rallypoint{extras}")
                use(place, python, wheel, extras)
        out.mkdir(parents=True, exist_ok=True)
        for one in (wheel, sdist):
            shutil.copy(one, out)
            say(f"{out / one.name}: {one.stat().st_size:,} bytes")
    return 0


def say(text: str) -> None:
    print(text, flush=True)


def call(*command: str | Path, cwd: Path = ROOT) -> str:
    """Its output. What it said goes to the terminal if it fails, and that ends everything."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=clean, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        raise SystemExit(f"error: {' '.join(str(part) for part in command)} ended with {done.returncode}")
    return done.stdout


def build(place: Path) -> tuple[Path, Path]:
    """Of what is committed, not of what happens to lie around."""
    source = place / "source"
    call("git", "clone", "--quiet", "--depth=1", f"file://{ROOT}", source)
    say("building the sdist, and the wheel from it")
    call(sys.executable, "-m", "build", "--outdir", place / "dist", source)
    call(sys.executable, "-m", "build", "--wheel", "--outdir", place / "again", source)
    (wheel,) = (place / "dist").glob("*.whl")
    (sdist,) = (place / "dist").glob("*.tar.gz")
    return wheel, sdist


def check_contents(wheel: Path, again: Path) -> None:
    """The wheel that was built from the sdist holds what one that is built from the source does."""
    names = _contents(wheel)
    missing = [name for name in NEEDED if name not in names]
    if missing:
        raise SystemExit(f"error: not in the wheel: {', '.join(missing)}")
    if names != _contents(again):
        raise SystemExit(f"error: the sdist lacks {_contents(again) - names} or adds {names - _contents(again)}")
    strays = [name for name in names if not name.startswith("rallypoint")]
    if strays:
        raise SystemExit(f"error: in the wheel, but not of the package: {', '.join(strays)}")


def _contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def pythons() -> dict[str, str]:
    """Those of this machine that are supported."""
    found = {}
    for version in SUPPORTED:
        homes = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
        here = shutil.which(f"python{version}") if not homes else str(homes[-1])
        if here:
            found[version] = here
        else:
            say(f"note: no Python {version} here: not tried")
    return found


def use(place: Path, python: str, wheel: Path, extras: str) -> None:
    """Install it where nothing else is, and use it."""
    home = place / "venv"
    shutil.rmtree(home, ignore_errors=True)
    call(python, "-m", "venv", home)
    inside = home / "bin" / "python"
    call(inside, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", f"{wheel}{extras}")
    say(f"  {call(home / 'bin' / 'rallypoint', '--version', cwd=place).strip()}")
    call(inside, "-c", USE_ALL if extras else USE_BARE, cwd=place)
    call(inside, ROOT / "examples" / "bare.py", cwd=place)


if __name__ == "__main__":
    sys.exit(main())
