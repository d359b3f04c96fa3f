"""A real browser for tests of pages: headless Chromium, driven by selenium.

Chromium is no Python package. Where it is missing, tests that ask for it are skipped, and say what to install.
"""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
HOW_TO_INSTALL = "apt-get install -y --no-install-recommends chromium chromium-driver"
SWITCHES = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_TIMEOUT_SECS = 60


class Browser:
    """One window."""

    def __init__(self, driver: Chrome) -> None:
        self._driver = driver

    def open(self, page: Path, width: int, height: int = 900) -> None:
        """Show a file in a window of that many CSS pixels, in light colours."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.emulate("screen", "light")
        self.log("browser"), self.log("performance")  # what was logged before is of another page
        self._driver.get(page.as_uri())
        assert self.run("return window.innerWidth") == width

    def emulate(self, media: str, scheme: str) -> None:
        """Let the page believe that it is printed (``print``), or that the user likes it ``dark``."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a function with this JavaScript as its body returns."""
        return self._driver.execute_script(script, *arguments)

    def picture(self, selector: str) -> bytes:
        """An element as PNG, also where it lies beyond the window."""
        script = "const box = document.querySelector(arguments[0]).getBoundingClientRect(); return box.toJSON()"
        clip = {key: self.run(script, selector)[key] for key in ("x", "y", "width", "height")} | {"scale": 1}
        shot = self._driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        return base64.b64decode(shot["data"])

    def log(self, kind: str) -> list[str]:
        """Messages since the last call: of the console (``browser``), or DevTools events (``performance``)."""
        return [entry["message"] for entry in self._driver.get_log(kind)]

    def requested(self) -> list[str]:
        """URLs that were asked for since the page was opened, its own first."""
        events = [json.loads(line)["message"] for line in self.log("performance")]
        return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]


@contextmanager
def open_browser(profile: Path) -> Iterator[Browser]:
    """A browser with a new profile in an empty folder. Skips the test where there is none."""
    missing = [str(path) for path in (CHROMIUM, DRIVER) if not path.exists()]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}: {HOW_TO_INSTALL}")
    options = ChromeOptions()
    options.binary_location = str(CHROMIUM)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    for switch in (*SWITCHES, f"--user-data-dir={profile}"):
        options.add_argument(switch)
    driver = Chrome(options=options, service=Service(str(DRIVER)))  # named, or selenium would download one
    try:
        driver.set_page_load_timeout(_TIMEOUT_SECS)
        driver.set_script_timeout(_TIMEOUT_SECS)
        yield Browser(driver)
    finally:
        driver.quit()
