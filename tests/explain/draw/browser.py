"""Pages as a browser has them."""

import html
import json
import pathlib
import re
import shutil
import subprocess

import pytest

PROBE = pathlib.Path(__file__).parent / "page_probe.js"
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    None,
)
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="neither Chromium nor Chrome is installed"
)


def looked_at(pages, widths, scheme, folder, asked="probe"):
    """What a script finds in each page at each width, which is in pixels.

    Args:
      scheme: what the reader's system is set to, "light" or "dark".
      folder: for files.
      asked: the function of `PROBE`, or another in JavaScript, that is asked.
    """
    frames = "".join(
        f'<iframe style="border:0; width:{width}px; height:900px" '
        f'srcdoc="{html.escape(text)}"></iframe>'
        for width in widths
        for text in pages
    )
    run = f"""
    onload = () => {{
      try {{
        const found = [...document.querySelectorAll("iframe")].map((frame) =>
          ({asked})(frame.contentDocument));
        document.body.textContent = JSON.stringify(found);
      }} catch (error) {{
        document.body.textContent = error.stack;
      }}
    }};
    """
    wrapper = folder / "wrapper.html"
    wrapper.write_text(
        "<!DOCTYPE html><meta charset=utf-8>"
        f"<script>{PROBE.read_text()}\n{run}</script><body>{frames}</body>"
    )
    result = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}",
            f"--user-data-dir={folder / 'profile'}",
            "--window-size=1400,1000",
            "--dump-dom",
            wrapper.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    body = re.search(r"<body>(.*)</body>", result.stdout, re.S)
    assert body, result.stderr[-2000:]
    assert body[1].startswith("["), body[1][:2000]
    reports = iter(json.loads(html.unescape(body[1])))
    return {width: [next(reports) for _ in pages] for width in widths}
