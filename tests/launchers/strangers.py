"""Programs that listen where a job would meet: a silent one, a web server, another job, and its bare store."""

import contextlib
import http.server
import socket
import threading

from torch.distributed import TCPStore

from runnerkit.engines.launch.meeting_point import MeetingPoint
from runnerkit.engines.process_environment import ProcessEnvironment

NUM_STRANGERS = 4


@contextlib.contextmanager
def strangers(ports):
    """Listen on the first four of `ports` until the block ends."""
    silent, web, other, bare = ports[:NUM_STRANGERS]
    with contextlib.ExitStack() as stack:
        stack.enter_context(socket.create_server(("127.0.0.1", silent)))
        server = stack.enter_context(
            http.server.ThreadingHTTPServer(("127.0.0.1", web), http.server.BaseHTTPRequestHandler)
        )
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.shutdown)
        stack.enter_context(MeetingPoint([other], job="somebody's", store_port=bare, on_loopback=True))
        store = TCPStore("127.0.0.1", bare, is_master=True, wait_for_workers=False)
        yield
        del store


def train_among_strangers(train):
    """Call the script of a launcher test, with the first ports of its job taken before rank zero looks for one."""
    place = ProcessEnvironment.read()
    with strangers(place.ports) if place.rank == 0 else contextlib.nullcontext():
        train()
