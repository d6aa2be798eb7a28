"""Two hosts on this machine: network namespaces joined by a switch, each with its own host name."""

import os
import shutil
import signal
import subprocess
import uuid

NAMES = ("host0", "host1")
PROGRAMS = ("ip", "nsenter", "unshare")


def why_not():
    """Return the reason why this machine cannot create network namespaces, or an empty string."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)}: apt-get install iproute2 util-linux"
    name = f"rk-{uuid.uuid4().hex[:8]}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode != 0:
        return "this kernel or container does not allow network namespaces"
    _run("ip", "netns", "del", name)
    return ""


class Hosts:
    """Context manager for two hosts, host0 and host1, at 10.77.0.1 and 10.77.0.2.

    As on Debian, each resolves its own name to 127.0.1.1, and only the other's name to its address.
    """

    def __init__(self, folder):
        prefix = f"rk-{uuid.uuid4().hex[:8]}"
        self.folder = folder
        self._switch = f"{prefix}-switch"
        self._namespaces = [f"{prefix}-{name}" for name in NAMES]
        self._added = []

    def __enter__(self):
        try:
            for namespace in (self._switch, *self._namespaces):
                _run("ip", "netns", "add", namespace)
                self._added.append(namespace)
            _run("ip", "-n", self._switch, "link", "add", "switch", "type", "bridge")
            _run("ip", "-n", self._switch, "link", "set", "switch", "up")
            for number, namespace in enumerate(self._namespaces):
                self._plug_in(number, namespace)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for namespace in self._added:
            subprocess.run(["ip", "netns", "del", namespace], check=False)

    def inside(self, number):
        """Return the command that runs another one on a host."""
        prepare = f'mount --bind {self.folder}/hosts{number} /etc/hosts && hostname {NAMES[number]} && exec "$@"'
        enter = ["nsenter", f"--net=/run/netns/{self._namespaces[number]}", "unshare", "--mount", "--uts"]
        return [*enter, "sh", "-c", prepare, "sh"]

    def pids(self, number):
        """List the processes on a host."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self._namespaces[number]).split()]

    def kill(self, number):
        """Kill all processes on a host at once."""
        pids = self.pids(number)
        for stop_first in (signal.SIGSTOP, signal.SIGKILL):  # so that no process notices another one's death
            for pid in pids:
                os.kill(pid, stop_first)

    def cut(self, number):
        """Disconnect a host from the switch silently."""
        _run("ip", "-n", self._switch, "link", "set", f"port{number}", "nomaster")

    def _plug_in(self, number, namespace):
        veth = ["type", "veth", "peer", "name", f"port{number}", "netns", self._switch]
        _run("ip", "link", "add", "name", "eth0", "netns", namespace, *veth)
        _run("ip", "-n", self._switch, "link", "set", f"port{number}", "master", "switch", "up")
        _run("ip", "-n", namespace, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _run("ip", "-n", namespace, "link", "set", device, "up")
        other = 1 - number
        text = f"127.0.0.1 localhost\n127.0.1.1 {NAMES[number]}\n10.77.0.{other + 1} {NAMES[other]}\n"
        (self.folder / f"hosts{number}").write_text(text)


def _run(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
