"""Notebooks in a real browser: JupyterLab's page in headless Chromium, in a folder that holds nothing but a copy that runs alone.

    make browser

which installs playwright, and playwright's Chromium where there is none on PATH or in $CHROMIUM.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import models

pytestmark = pytest.mark.browser
if not importlib.util.find_spec("jupyterlab"):  # which takes seconds to import
    pytest.skip("JupyterLab is not installed", allow_module_level=True)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
# None: playwright's own.
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")

FOLDER = Path(models.__file__).resolve().parent / "notebooks"
sys.path.append(str(FOLDER))

import alone  # noqa: E402

FLAGS = ("no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking", "disable-component-update", "disable-sync")  # fmt: skip
SETTINGS = {  # every cell stays in the page, seen or not; no question about news
    "notebook-extension/tracker": '{"windowingMode": "none"}',
    "apputils-extension/notification": '{"fetchNews": "false"}',
}
# The kernel waits, and the notebook's cells are on the page.
READY = """() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status == "idle"
    && document.querySelector(".jp-CodeCell")"""
CUT = "areas => areas.filter(area => area.scrollWidth > area.clientWidth + 1).map(area => area.innerText)"


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """What gives the address of a notebook in JupyterLab, and the folder that it shows."""
    for name, text in SETTINGS.items():
        path = tmp_path / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for variable in ("JUPYTERLAB_SETTINGS_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path / ("settings" if "LAB" in variable else "runtime")))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("LESSON_BATCH", "1")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (folder := tmp_path / "empty").mkdir()
    options = ["--no-browser", "--port=0", "--expose-app-in-browser", "--allow-root"]
    command = [sys.executable, "-m", "jupyterlab", *options]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as server:
        lines = iter(server.stderr.readline, "")
        lab, token = next(
            found.groups() for line in lines if (found := re.search(r"(http:\S+/lab)(\?\S+)", line))
        )
        log = subprocess.Popen(["cat"], stdin=server.stderr, stdout=subprocess.DEVNULL)  # else its pipe fills
        yield lambda name: f"{lab}/tree/{name}{token}", folder
        server.terminate()
        log.terminate()


@pytest.mark.parametrize(
    "name, count", [("00_quickstart", 4), ("fuse", 2), ("31_conv2d_min_add_multiply", 4)]
)
def test_runs_in_a_browser(name, count, lab, tmp_path):
    """All cells run to the last; every picture is drawn, there is no error, and nothing is wider than its cell."""
    address_of, folder = lab
    path = folder / f"{name}.ipynb"
    path.write_text(alone.copy(FOLDER / path.name, alone.cell(alone.archive())), encoding="utf-8")
    with playwright.sync_playwright() as engines:
        options = {"executable_path": CHROMIUM, "args": [f"--{flag}" for flag in FLAGS]}
        browser = engines.chromium.launch_persistent_context(str(tmp_path / "browser"), **options)
        page = browser.pages[0]
        page.goto(address_of(path.name))
        page.wait_for_function(READY, timeout=120_000)
        page.evaluate("jupyterapp.commands.execute('notebook:clear-all-cell-outputs')")
        playwright.expect(page.locator(".jp-OutputArea-output")).to_have_count(0)
        assert page.evaluate("jupyterapp.commands.execute('notebook:run-all-cells')"), "to the last cell"
        assert page.locator("[data-mime-type*=error], [data-mime-type*=stderr]").all_inner_texts() == []
        pictures = page.locator(".jp-RenderedImage img").all()
        assert (
            len(pictures) >= count
            and min(each.evaluate("img => img.naturalWidth") for each in pictures) > 300
        )
        assert page.locator(".jp-OutputArea-output").evaluate_all(CUT) == [], "wider than the page"
        browser.close()
