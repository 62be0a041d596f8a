"""HTTP requests to servers that may answer with anything."""

import time

import requests
from urllib3.exceptions import HTTPError

from envs import EnvError

LARGEST_REPLY = 16 << 20  # bytes; far more than any observation that a model could read


class WireSession(requests.Session):
    """Follows no redirect: a server must not choose who gets a request. requests itself would look
    at the address even with allow_redirects=False, and raise any exception for a malformed one."""

    def get_redirect_target(self, resp: requests.Response) -> None:
        """There is none."""


def read_body(response: requests.Response, url: str, deadline: float) -> bytes:
    """Read a streamed reply as it arrives, so that a slow trickle of bytes cannot outlast the
    deadline, a time of `time.monotonic`. Raises requests.RequestException, and EnvError for a reply
    that is too large."""
    data = bytearray()
    try:
        while part := response.raw.read1(65536, decode_content=True):
            data += part
            if len(data) > LARGEST_REPLY:
                raise EnvError(f"{url}: a reply of more than {LARGEST_REPLY >> 20} MiB")
            if time.monotonic() > deadline:
                raise requests.Timeout("no end of the reply")
    except HTTPError as e:
        raise requests.ConnectionError(str(e)) from e
    return bytes(data)
