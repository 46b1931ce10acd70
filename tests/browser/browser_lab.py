"""JupyterLab on loopback in a folder of its own, driven in a real Chromium: what a reader does, and what is seen.

`open_lab` starts a server and a browser and ends both. A Notebook runs cells as a reader does (the menu) or sends code
to its kernel; what went wrong on the way (console, outputs, requests off this machine) is kept in lists.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM_FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync")
CHROMIUM_FLAGS += ("--disable-background-networking", "--disable-component-update")
PATIENCE_S = 240.0  # of each wait: on a busy machine only a page that hangs takes as long
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {"windowingMode": "none"},  # cells out of sight are in the document, too
}


def find_chromium() -> str | None:
    """Return the path of the system's Chromium or Chrome, or None; without windows it takes half the processor time."""
    return next((path for name in CHROMIUM_NAMES if (path := shutil.which(name))), None)


def missing() -> str:
    """Return what browser tests lack on this machine, in one line; empty when nothing."""
    if find_chromium() is None:
        return "no Chromium: run make browser"
    try:
        import jupyterlab  # noqa: F401
        import playwright.sync_api  # noqa: F401
    except ModuleNotFoundError as error:
        return f"no {error.name}: run make browser"
    return ""


@dataclass
class Notebook:
    """A notebook on screen.

    Attributes:
        page: playwright's page.
        base: the server's address.
        console: errors that the browser's console showed.
        offsite: addresses of requests that left this machine.
    """

    page: Any
    base: str
    console: list[str] = field(default_factory=list)
    offsite: list[str] = field(default_factory=list)

    def watch(self) -> None:
        """Keep console errors and requests that leave loopback, from now on; each wait may take long."""
        self.page.set_default_timeout(PATIENCE_S * 1000)
        here = (self.base, self.base.replace("http:", "ws:"), "data:", "blob:")
        self.page.on("console", lambda said: self.console.append(said.text[:300]) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.console.append(str(error)[:300]))
        self.page.on("request", lambda asked: None if asked.url.startswith(here) else self.offsite.append(asked.url))
        self.page.on("websocket", lambda asked: None if asked.url.startswith(here) else self.offsite.append(asked.url))

    def wait_until(self, condition: str, argument: object = None, *, timeout_s: float = PATIENCE_S) -> None:
        """Wait until a JavaScript condition holds in the page."""
        self.page.wait_for_function(condition, arg=argument, timeout=timeout_s * 1000, polling=50)

    def wait_for_kernel(self) -> None:
        """Wait until a kernel is connected and idle, as the status bar shows it."""
        self.page.wait_for_selector(".jp-Notebook .jp-CodeCell")
        self.page.locator("#jp-main-statusbar", has_text="| Idle").wait_for()

    def run_all(self, *, timeout_s: float = PATIENCE_S) -> None:
        """Run all cells by the menu and wait until each code cell that has text has a number."""
        self.page.locator(".lm-MenuBar-item", has_text="Run").first.click()
        items = (f'.lm-Menu-item[data-command="{name}"]' for name in ("notebook:run-all-cells", "runmenu:run-all"))
        self.page.locator(", ".join(items)).first.click()
        waiting = """() => {
            const cells = [...document.querySelectorAll(".jp-Notebook .jp-CodeCell")];
            const written = cells.filter((cell) => cell.querySelector(".cm-content")?.innerText.trim());
            const ran = (cell) => /^\\[\\d+\\]:/.test(cell.querySelector(".jp-InputPrompt").innerText);
            return written.length && written.every(ran);
        }"""
        self.wait_until(waiting, timeout_s=timeout_s)
        self.wait_for_kernel()

    def trouble(self) -> list[str]:
        """Return error outputs and texts on stderr that the notebook shows."""
        kinds = [f'.jp-Notebook [data-mime-type="application/vnd.jupyter.{kind}"]' for kind in ("error", "stderr")]
        shown = "(kinds) => [...document.querySelectorAll(kinds)].map((output) => output.innerText.slice(0, 400))"
        return list(self.page.evaluate(shown, ", ".join(kinds)))

    def execute(self, code: str, *, timeout_s: float = PATIENCE_S) -> str:
        """Run code in the notebook's kernel without a cell and return what it printed.

        Whatever was done on the page before has reached the kernel first. A widget sends one change at a time and keeps
        the next until the kernel is done with it; so after two empty requests nothing is on its way. Else a key's
        change would arrive after an assignment made here, and undo it.

        Raises:
            RuntimeError: the code raised.
        """
        send = """async (code) => {
            const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel, said = [];
            for (const _ of [1, 2]) await kernel.requestExecute({ code: "", store_history: false }).done;
            const future = kernel.requestExecute({ code, store_history: false });
            future.onIOPub = ({ header, content }) => { if (header.msg_type === "stream") said.push(content.text); };
            const reply = (await future.done).content;
            return { said: said.join(""), error: reply.status === "ok" ? "" : `${reply.ename}: ${reply.evalue}` };
        }"""
        self.page.set_default_timeout(timeout_s * 1000)
        answer = self.page.evaluate(send, code)
        if answer["error"]:
            raise RuntimeError(answer["error"])
        return str(answer["said"])


@contextmanager
def serve(work: Path) -> Iterator[tuple[str, str]]:
    """Serve a folder of notebooks as `distlab lesson start` does: (address, token); the server ends with the block.

    Raises:
        RuntimeError: the server ended or gave no address in time.
    """
    for name, values in SETTINGS.items():
        path = work / ".jupyter" / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    command = [sys.executable, "-m", "distlab", "lesson", "start", "--work", str(work), "--no-browser"]
    log, deadline = work / "start.log", time.monotonic() + PATIENCE_S
    with log.open("wb") as out:
        started = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
    try:
        while not (found := re.search(r"(http://127\.0\.0\.1:\d+)/lab\S*token=(\w+)", log.read_text())):
            if started.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no server; its log ends:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield found[1], found[2]
    finally:
        end(started)


def end(server: subprocess.Popen[bytes]) -> None:
    """End a server and its kernels: politely, then not."""
    for sign, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, 5)):
        if server.poll() is None:
            os.kill(server.pid, sign)
            try:
                server.wait(patience)
            except subprocess.TimeoutExpired:
                continue


@contextmanager
def open_notebook(address: str, base: str) -> Iterator[Notebook]:
    """Show an address in a fresh Chromium, as a Notebook that watches for trouble, with its kernel ready."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=find_chromium(), headless=True, args=list(CHROMIUM_FLAGS))
        try:
            notebook = Notebook(browser.new_page(viewport={"width": 1400, "height": 1000}), base)
            notebook.watch()
            notebook.page.goto(address, wait_until="domcontentloaded")
            notebook.wait_for_kernel()
            yield notebook
        finally:
            browser.close()


@contextmanager
def open_lab(work: Path, name: str) -> Iterator[Notebook]:
    """Serve a folder and show one of its notebooks."""
    with serve(work) as (base, token), open_notebook(f"{base}/lab/tree/{name}?token={token}&reset", base) as notebook:
        yield notebook


def write_notebook(path: Path, cells: list[str]) -> None:
    """Write a notebook of code cells."""
    empty = {"cell_type": "code", "metadata": {}, "execution_count": None, "outputs": []}
    body = [empty | {"id": f"cell-{place}", "source": code} for place, code in enumerate(cells)]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    path.write_text(json.dumps({"cells": body, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}))
