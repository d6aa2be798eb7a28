"""An S3 server on this machine, whose objects are in memory.

``python -m tests.storage.s3_server`` prints its URL and serves until its standard input is closed.
"""

import contextlib
import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.free_port import free_port

KEY, SECRET, REGION = "a-key", "a-secret", "us-east-1"


class OneAtATime:
    """WSGI middleware that makes each request atomic, as S3's are: moto checks If-Match first, and then writes."""

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self._app = app
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))  # a slow client delays no other
        environ["wsgi.input"] = io.BytesIO(body)
        with self._lock:
            return list(self._app(environ, start_response))


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """Serve from a thread of this process; yield the server's URL."""
    # These are the parts of moto's ThreadedMotoServer, which accepts no middleware.
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # its log of requests
    app = OneAtATime(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", free_port(), app, threaded=True, request_handler=MotoRequestHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def environment(url: str) -> dict[str, str]:
    """Return the environment variables with which boto3 and s3fs use a server, and no file of the user."""
    return {
        "AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": REGION, "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull, "NO_PROXY": "127.0.0.1",
    }  # fmt: skip


@dataclass(frozen=True)
class Bucket:
    """Direct access to the objects of a bucket, past any proxy, for a test's preparations and assertions."""

    name: str
    client: Any

    @classmethod
    def create(cls, name: str, server: str) -> "Bucket":
        """Create a bucket in the server with this URL."""
        import boto3

        client = boto3.client(
            "s3", endpoint_url=server, aws_access_key_id=KEY, aws_secret_access_key=SECRET, region_name=REGION
        )
        client.create_bucket(Bucket=name)
        return cls(name, client)

    def url(self, name: str = "run") -> str:
        """Return the URL of an object or a folder."""
        return f"s3://{self.name}/{name}"

    def names(self, prefix: str = "") -> list[str]:
        """List the objects whose name has a prefix, sorted."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix)
        return [each["Key"] for page in pages for each in page.get("Contents", [])]

    def read(self, name: str) -> bytes:
        return self.client.get_object(Bucket=self.name, Key=name)["Body"].read()

    def objects(self, prefix: str = "") -> Mapping[str, bytes]:
        """Return the contents of all objects whose name has a prefix."""
        return {name: self.read(name) for name in self.names(prefix)}

    def uploads(self) -> list[str]:
        """List the objects with an unfinished upload in parts."""
        return [each["Key"] for each in self.client.list_multipart_uploads(Bucket=self.name).get("Uploads", [])]

    def put(self, name: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=name, Body=data)

    def delete(self, name: str) -> None:
        self.client.delete_object(Bucket=self.name, Key=name)


if __name__ == "__main__":
    with serving() as url:
        print(url, flush=True)
        sys.stdin.read()
