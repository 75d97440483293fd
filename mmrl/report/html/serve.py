"""`mmrl watch --serve`: the report of a run in a browser, rendered for each request, on this machine only."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from mmrl.report.html.page import report_html
from mmrl.report.records import read_run

LOOPBACK = "127.0.0.1"
REFRESH = 15  # seconds


class ReportServer(ThreadingHTTPServer):
    """Serves the report of the run in `folder` on loopback. port 0 takes any free one."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        read_run(folder)  # raises UserError now if there is no such folder
        self.folder = folder
        super().__init__((LOOPBACK, port), ReportHandler)

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_address[1]}/"


class ReportHandler(BaseHTTPRequestHandler):
    """Answers `/` with the report as it is now, and nothing else."""

    server: ReportServer

    def do_GET(self) -> None:
        """Answers with the report of the run as it is now; 404 for other paths and hosts."""
        # Another host name is refused: a foreign web page could read the report with it (DNS rebinding).
        if self.path != "/" or self.headers.get("Host") != self.server.address.removeprefix("http://").rstrip("/"):
            self.send_error(404)
            return
        run = read_run(self.server.folder)
        page = report_html([run]).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        if run.ending.state in ("running", "empty", "unknown"):
            self.send_header("Refresh", str(REFRESH))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *arguments: object) -> None:
        """Writes no line for a request."""


def serve(folder: Path, port: int) -> None:
    """Serves the report of a run until Ctrl-C. Raises UserError if there is no such folder."""
    with ReportServer(folder, port) as server:
        print(f"{server.address} shows {folder}; Ctrl-C ends it", flush=True)
        server.serve_forever()
