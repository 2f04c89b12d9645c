"""Builds the documentation as a site: the pages of docs/ and those at the top of the project, links checked.

`make docs` calls it; what it makes is in build/site. A link that leads nowhere, or a page that is in no menu, is an
error.
"""

from __future__ import annotations

import argparse
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
    """All pages in one directory, as mkdocs wants them."""
    shutil.copytree(ROOT / "docs", place)
    for name, page in TOP.items():
        (place / page).write_text(relinked((ROOT / name).read_text(encoding="utf-8"), ROOT), encoding="utf-8")
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = relinked(page.read_text(encoding="utf-8"), page.parent)
        (place / page.relative_to(ROOT / "docs")).write_text(text, encoding="utf-8")


def relinked(text: str, beside: Path) -> str:
    """With links from a page in that directory to where the pages are now.

    What is not a page (a source file, an example) is named instead of linked: the site does not hold it.
    """

    def moved(found: re.Match[str]) -> str:
        before, target, anchor, after = found.groups(default="")
        if "://" in target or target.startswith("mailto:"):
            return found.group()
        path = (beside / target).resolve()
        if not path.exists():
            raise SystemExit(f"error: a page in {beside} links to {target}, which does not exist")
        inside = path.relative_to(ROOT)
        if str(inside) in TOP:
            return f"{before}{TOP[str(inside)]}{anchor}{after}"
        if inside.parts[0] == "docs":
            return f"{before}{'/'.join(inside.parts[1:])}{anchor}{after}"
        return f"`{inside}`"

    return _LINK.sub(moved, text)


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
