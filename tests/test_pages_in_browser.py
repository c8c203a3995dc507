"""Every page in a real browser: no word in the console, as narrow as the window, dark where the reader's system is."""

import shutil
import subprocess

import numpy as np
import pytest
from page_makers import PAGES, pictures
from PIL import Image

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs Chromium on the path")
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr")
SCHEMES = {"light": "--blink-settings=preferredColorScheme=1", "dark": "--blink-settings=preferredColorScheme=0"}
WIDTHS = {"light": 500, "dark": 1200}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("pages")


def looked_at(page, scheme, directory):
    """The window as an array of pixels ``[height, width, 3]``, and what the console said."""
    picture = directory / f"{page.stem}_{scheme}.png"
    own = (f"--user-data-dir={directory / 'profile'}", f"--window-size={WIDTHS[scheme]},900", f"--screenshot={picture}")
    command = [BROWSER, *OPTIONS, SCHEMES[scheme], *own, "--virtual-time-budget=3000", f"file://{page}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    said = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return np.asarray(Image.open(picture).convert("RGB")).astype(int), said


@needs_browser
@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_without_a_word_in_the_console_light_and_dark(name, directory):
    page = PAGES[name](directory)
    for scheme in SCHEMES:
        pixels, said = looked_at(page, scheme, directory)
        assert said == []
        brightness = pixels.mean(axis=2)
        assert (np.median(brightness) < 64) == (scheme == "dark")
        assert brightness.max() - brightness.min() > 150  # there is something to read
        edges = brightness[:, [2, -3]]
        assert np.ptp(edges) < 8, f"{name} is wider than a window of {WIDTHS[scheme]} pixels"


def test_pictures_are_drawn(directory):
    pictures(directory)
    for name in ("loss_curve", "experts", "schedule", "schedule_long"):
        assert (directory / f"{name}.png").read_bytes().startswith(b"\x89PNG")
