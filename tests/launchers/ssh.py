"""Ways from one host to another: OpenSSH's server on each, or a stand-in that enters the host's namespaces."""

import shlex
import shutil
import subprocess
from pathlib import Path

from tests.launchers.hosts import NAMES
from tests.launchers.jobs import wait_until

SERVER_CONFIG = """
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
ForceCommand {folder}/session
PidFile none
PermitRootLogin yes
StrictModes no
UsePAM no
"""
CLIENT_CONFIG = """
IdentityFile {folder}/key
UserKnownHostsFile {folder}/known_hosts
GlobalKnownHostsFile none
StrictHostKeyChecking accept-new
BatchMode yes
LogLevel ERROR
"""


def why_not():
    """Return the reason why this machine cannot run a server, or an empty string."""
    return "" if _server() else "needs sshd: apt-get install openssh-server"


def install_stand_in(jobs, hosts):
    """Put a program `ssh` first on the PATH that runs the command on the named host, without a connection."""
    cases = "".join(
        f'{name}) exec {shlex.join(hosts.inside(number))} sh -c "$*" ;;\n' for number, name in enumerate(NAMES)
    )
    _write_program(jobs.folder / "bin" / "ssh", f"shift  # -tt\nhost=$1\nshift\ncase $host in\n{cases}esac\n")


class Servers:
    """Context manager for a server on each host; `ssh` on the PATH of the jobs trusts and reaches them."""

    def __init__(self, jobs, hosts):
        self._jobs = jobs
        self._hosts = hosts
        self._folder = jobs.folder / "ssh"
        self._servers = []

    def __enter__(self):
        self._configure()
        Path("/run/sshd").mkdir(exist_ok=True)  # the server's empty folder, which its service would create
        for number in range(len(NAMES)):
            command = [*self._hosts.inside(number), _server(), "-D", "-e", "-f", f"{self._folder}/sshd_config"]
            with self._log(number).open("w") as log:
                self._servers.append(subprocess.Popen(command, stdout=log, stderr=log))
        try:
            for number in range(len(NAMES)):
                self._wait_for(number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for server in self._servers:
            server.terminate()
            server.wait(10)

    def _configure(self):
        self._folder.mkdir()
        for name in ("host_key", "key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{self._folder}/{name}"]
            subprocess.run(command, check=True)
        (self._folder / "sshd_config").write_text(SERVER_CONFIG.format(folder=self._folder))
        (self._folder / "ssh_config").write_text(CLIENT_CONFIG.format(folder=self._folder))
        # A login has a fresh environment, and the user's ~/.bashrc may change the PATH.
        exports = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in self._jobs.changed.items())
        _write_program(self._folder / "session", f'{exports}exec bash -c "$SSH_ORIGINAL_COMMAND"\n')
        _write_program(
            self._jobs.folder / "bin" / "ssh", f'exec {shutil.which("ssh")} -F {self._folder}/ssh_config "$@"\n'
        )

    def _log(self, number):
        return self._folder / f"{NAMES[number]}.log"

    def _wait_for(self, number):
        wait_until(lambda: "listening on" in self._log(number).read_text(), 20, self._log(number).read_text)


def _write_program(path, text):
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)


def _server():
    return shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/sbin")
