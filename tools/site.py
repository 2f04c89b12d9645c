"""Builds the documentation as a site: the pages of docs/ and those at the top of the project, links checked.

`make docs` calls it; what it makes is in build/site. A link that leads nowhere, or a page that is in no menu, is an
error.
"""

from __future__ import annotations

import argparse
import os.path
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOP = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def gather(place: Path) -> None:
    """Copy all pages into one directory tree, as mkdocs wants them."""
    shutil.copytree(ROOT / "docs", place)
    for page in [*(ROOT / name for name in TOP), *sorted((ROOT / "docs").rglob("*.md"))]:
        (place / on_the_site(page)).write_text(relinked(page), encoding="utf-8")


def on_the_site(page: Path) -> Path:
    """The path of a page of the repository inside the site's sources."""
    name = str(page.relative_to(ROOT))
    return Path(TOP[name]) if name in TOP else page.relative_to(ROOT / "docs")


def relinked(page: Path) -> str:
    """The text of a page, its links changed to the paths on the site.

    A link to a file that is no page (a source file, an example) becomes its name: the site does not hold it.
    """
    start = on_the_site(page).parent

    def moved(found: re.Match[str]) -> str:
        before, target, anchor, after = found.groups(default="")
        if "://" in target or target.startswith("mailto:"):
            return found.group()
        path = (page.parent / target).resolve()
        if not path.exists():
            raise SystemExit(f"error: {page} links to {target}, which does not exist")
        inside = path.relative_to(ROOT)
        if str(inside) in TOP or inside.parts[0] == "docs":
            return f"{before}{os.path.relpath(on_the_site(path), start)}{anchor}{after}"
        return f"`{inside}`"

    return _LINK.sub(moved, page.read_text(encoding="utf-8"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=ROOT / "build" / "site", help="where to put the site")
    out: Path = parser.parse_args().to.resolve()
    pages = out.parent / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    pages.parent.mkdir(parents=True, exist_ok=True)
    gather(pages)
    config = out.parent / "mkdocs.yml"
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    config.write_text(f"{text}\ndocs_dir: {pages}\nsite_dir: {out}\n", encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", str(config)]
    done = subprocess.run(command, check=False)
    if done.returncode == 0:
        print(f"the documentation is in {out}/index.html")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
