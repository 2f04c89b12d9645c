"""The documentation builds as a site, without a warning."""

import subprocess
import sys

from tests.docs.blocks import ROOT


def test_site_is_built_and_every_link_leads_somewhere(tmp_path):
    command = [sys.executable, str(ROOT / "tools" / "site.py"), "--to", str(tmp_path / "site" / "html")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    start = (tmp_path / "site" / "html" / "index.html").read_text(encoding="utf-8")
    assert "Rendezvous for elastic distributed jobs" in start


def test_site_fetches_nothing_from_elsewhere(tmp_path):
    command = [sys.executable, str(ROOT / "tools" / "site.py"), "--to", str(tmp_path / "site" / "html")]
    subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    for page in (tmp_path / "site" / "html").rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        for marker in ('src="http', 'rel="stylesheet" href="http', "@import"):
            assert marker not in text, f"{page}: {marker}"
