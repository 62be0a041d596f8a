"""HTTP servers on this machine, for tests."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Answers what its function `answer` gives for the request, which has its `body`."""

    def do_GET(self):
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, headers, content = self.answer(self)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content.encode() if isinstance(content, str) else content)

    do_POST = do_GET

    def log_message(self, *_):
        """Log nothing."""


@contextmanager
def serving(answer, **attributes):
    """A server on a free port -> the port. answer(request) -> (status, headers, text or bytes);
    attributes: other methods of the handler."""
    handler = type("Answering", (Handler,), {"answer": staticmethod(answer), **attributes})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()
