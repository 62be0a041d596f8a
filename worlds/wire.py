"""HTTP requests to servers that may answer with anything, slowly or without an end."""

import http.client
import io
import math
import time
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError
from urllib3.poolmanager import PoolManager, pool_classes_by_scheme

from envs import EnvError

LARGEST_HEAD = 1 << 16  # bytes; with any number of "100 Continue" before it
LARGEST_REPLY = 16 << 20  # bytes; far more than any observation that a model could read


class LimitedReader(io.RawIOBase):
    """Reads from a socket. The socket's timeout limits the time of a single read. Here it limits
    the time of all reads together, so that a slow trickle of bytes cannot outlast it."""

    def __init__(self, sock: Any, reader: io.RawIOBase):
        self.sock, self.reader = sock, reader
        self.timeout = sock.gettimeout()
        self.deadline = time.monotonic() + self.timeout
        self.bytes_left = LARGEST_HEAD

    def readable(self) -> bool:
        """See io."""
        return True

    def readinto(self, buffer: Any) -> int:
        """See io. Raises OSError when the time is over, HTTPException for too many bytes."""
        self.sock.settimeout(max(1e-3, self.deadline - time.monotonic()))
        try:
            count = self.reader.readinto(buffer)
        finally:
            self.sock.settimeout(self.timeout)
        self.bytes_left -= count
        if self.bytes_left < 0:
            raise http.client.HTTPException(f"a head of more than {LARGEST_HEAD >> 10} KiB")
        return count

    def close(self) -> None:
        """See io."""
        self.reader.close()
        super().close()


class LimitedResponse(http.client.HTTPResponse):
    """A reply whose head is limited in bytes, and which is limited in time as a whole."""

    def __init__(self, sock: Any, *args: Any, **kw: Any):
        super().__init__(sock, *args, **kw)
        self.reader = LimitedReader(sock, self.fp.detach())
        self.fp = io.BufferedReader(self.reader)

    def begin(self) -> None:
        """Read the head. `read_body` counts the bytes of the body, which may be compressed."""
        super().begin()
        self.reader.bytes_left = math.inf


def _limited(pool):
    connection = type("Connection", (pool.ConnectionCls,), {"response_class": LimitedResponse})
    return type("Pool", (pool,), {"ConnectionCls": connection})


POOLS = {scheme: _limited(pool) for scheme, pool in pool_classes_by_scheme.items()}


class LimitedAdapter(HTTPAdapter):
    """Connections whose replies are a `LimitedResponse`."""

    def init_poolmanager(self, *args: Any, **kw: Any) -> None:
        """See requests."""
        super().init_poolmanager(*args, **kw)
        self.poolmanager.pool_classes_by_scheme = POOLS

    def proxy_manager_for(self, *args: Any, **kw: Any) -> PoolManager:
        """See requests."""
        manager = super().proxy_manager_for(*args, **kw)
        manager.pool_classes_by_scheme = POOLS
        return manager


class WireSession(requests.Session):
    """Gives no server more time for a reply than the timeout, and follows no redirect: a server
    must not choose who gets a request. requests itself would look at the address even with
    allow_redirects=False, and raise any exception for a malformed one."""

    def __init__(self, **options: Any):
        super().__init__()
        for scheme in ("http://", "https://"):
            self.mount(scheme, LimitedAdapter(**options))

    def get_redirect_target(self, resp: requests.Response) -> None:
        """None: a redirect is a reply like any other."""


def read_body(response: requests.Response, url: str) -> bytes:
    """The body of a streamed reply. Raises requests.RequestException, and EnvError for one that is
    too large."""
    data = bytearray()
    try:
        while part := response.raw.read1(65536, decode_content=True):
            data += part
            if len(data) > LARGEST_REPLY:
                raise EnvError(f"{url}: a reply of more than {LARGEST_REPLY >> 20} MiB")
    except HTTPError as e:
        raise requests.ConnectionError(str(e)) from e
    return bytes(data)
