"""A headless Chromium, and a JupyterLab server of our own, for the tests of this folder.

A machine without Chromium skips these tests and says so; with REQUIRE_BROWSER=1 (as in .ci/run) it fails them.
Pictures of what was seen are written to tests/browser/pictures/ (ignored by git).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PICTURES = Path(__file__).parent / "pictures"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync", "--no-first-run"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def chromium() -> str:
    """The system's Chromium: playwright's own cannot be downloaded everywhere."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    path = next((found for name in names if (found := shutil.which(name))), None)
    missing = "no Chromium on this machine (apt-get install chromium): the live view was not looked at in a browser"
    if path is None and os.environ.get("REQUIRE_BROWSER") == "1":
        pytest.fail(missing)
    if path is None:
        pytest.skip(missing)
    return path


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    """One browser for a module (playwright's Browser): while it is open, this thread has a running event loop."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        instance = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield instance
        instance.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A fresh page that has the network."""
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    context.set_default_timeout(30_000)
    yield context.new_page()
    context.close()


@pytest.fixture
def offline_page(browser: Any) -> Iterator[Any]:
    """A fresh page with the network off, for files that must need nothing: open them as ``file://``."""
    context = browser.new_context(viewport={"width": 1400, "height": 1000}, offline=True)
    context.set_default_timeout(30_000)
    yield context.new_page()
    context.close()


@pytest.fixture
def picture() -> Callable[[Any, str], Path]:
    """``picture(page, "name")`` writes a screenshot to tests/browser/pictures/ and returns its path."""

    def shoot(page: Any, name: str) -> Path:
        PICTURES.mkdir(exist_ok=True)
        path = PICTURES / f"{name}.png"
        page.screenshot(path=str(path), full_page=False)
        return path

    return shoot


class Lab:
    """A JupyterLab server over a folder of its own; its ``python3`` kernel is this interpreter."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notebooks = folder / "notebooks"
        self.notebooks.mkdir(parents=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        spec = {
            "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            "display_name": "Python 3 (ipykernel)",
            "language": "python",
        }
        kernel = folder / "share" / "kernels" / "python3"
        kernel.mkdir(parents=True)
        (kernel / "kernel.json").write_text(json.dumps(spec))
        self._setting("notification", {"fetchNews": "false", "checkForUpdates": False})
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
            "JUPYTER_PATH": str(folder / "share"),
            "JUPYTER_CONFIG_DIR": str(folder / "config"),
            "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
            "JUPYTER_DATA_DIR": str(folder / "data"),
            "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
            "IPYTHONDIR": str(folder / "ipython"),
            "OMP_NUM_THREADS": "1",
        }
        self.log = (folder / "server.log").open("wb")
        options = [
            *("--ip=127.0.0.1", f"--port={self.port}", "--no-browser", "--allow-root"),
            *(
                "--IdentityProvider.token=",
                "--LabApp.expose_app_in_browser=True",
                "--LabApp.extension_manager=readonly",
            ),
            f"--ServerApp.root_dir={self.notebooks}",
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options],
            env=environment,
            stdout=self.log,
            stderr=self.log,
            cwd=folder,
            start_new_session=True,
        )
        self._wait_until_up()

    def _setting(self, name: str, value: dict[str, Any]) -> None:
        file = self.folder / "settings" / "@jupyterlab" / "apputils-extension" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(value))

    def theme(self, name: str) -> None:
        """``"JupyterLab Dark"`` or ``"JupyterLab Light"``, for pages opened from now on."""
        self._setting("themes", {"theme": name})

    def _wait_until_up(self, seconds: float = 90) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api", timeout=2).close()
                return
            except OSError:
                time.sleep(0.3)
        self.close()
        pytest.fail("JupyterLab did not start:\n" + (self.folder / "server.log").read_text()[-2000:])

    def open(self, page: Any, notebook: str) -> None:
        """Opens a notebook of the server's folder and waits for its kernel."""
        page.goto(
            f"http://127.0.0.1:{self.port}/lab/tree/{notebook}?reset", wait_until="domcontentloaded", timeout=90_000
        )
        page.wait_for_function(
            "window.jupyterapp && window.jupyterapp.shell.currentWidget?.sessionContext", timeout=90_000
        )
        page.wait_for_function(
            "window.jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status === 'idle'", timeout=90_000
        )

    @staticmethod
    def run_all(page: Any) -> None:
        """Runs all cells and returns at once: the command's own promise ends with the last cell."""
        page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells'); }")

    @staticmethod
    def cell_is_running(page: Any) -> bool:
        """Whether a cell is at work. (The kernel's own status turns idle after each answered widget message.)"""
        return "[*]:" in page.locator(".jp-InputArea-prompt").all_inner_texts()

    @staticmethod
    def outputs(page: Any) -> list[dict[str, Any]]:
        """Every output of the open notebook: also those of cells that are out of sight, which the page leaves out."""
        book = page.evaluate("() => window.jupyterapp.shell.currentWidget.content.model.toJSON()")
        return [output for cell in book["cells"] for output in cell.get("outputs", ())]

    @staticmethod
    def wait_for_last_cell(page: Any, seconds: float) -> None:
        """Waits until every code cell has run (a cell at work, or waiting, has no number)."""
        page.wait_for_function(
            """() => window.jupyterapp.shell.currentWidget.content.model.toJSON().cells.every(
                cell => cell.cell_type != 'code' || cell.execution_count !== null)""",
            timeout=1000 * seconds,
        )

    def close(self) -> None:
        """Ends the server and its kernels: they are in the process group that was started for them."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(10)
        self.log.close()


@pytest.fixture(scope="session")
def lab(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A JupyterLab server for the session."""
    server = Lab(tmp_path_factory.mktemp("lab"))
    yield server
    server.close()
