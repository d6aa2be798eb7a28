"""A private Slurm cluster of two nodes on this machine, started by root for one test and stopped completely."""

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

from tests.free_port import free_ports
from tests.launchers.jobs import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo", "unshare")
NODES = ("node1", "node2")
# The ports of jobs are derived from their numbers, so no two clusters that run at once may number their jobs alike.
# A credential that lives 5 s lets a requeued job start again after 6 s instead of two minutes.
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
FirstJobId={ports[0]}00
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=2,sched_min_interval=0,bf_interval=2
NodeName=node1 NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 State=UNKNOWN
NodeName=node2 NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 State=UNKNOWN
PartitionName=low Nodes=node1,node2 Default=YES PriorityTier=1 GraceTime=0 State=UP
PartitionName=high Nodes=node1,node2 PriorityTier=10 GraceTime=0 State=UP
"""


def why_not():
    """Return the reason why this machine cannot run a cluster, or an empty string."""
    if os.geteuid() != 0:
        return "a private Slurm cluster needs root"
    missing = [name for name in PROGRAMS if _program(name) is None]
    return f"needs {', '.join(missing)}: apt-get install slurm-wlm munge" if missing else ""


class Slurm:
    """Context manager for a running cluster; `environment` lets commands such as srun find it."""

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: a socket's path is limited to 107 bytes
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self._daemons = []

    def __enter__(self):
        try:
            self._configure()
            self._start("munged", "--foreground", "--force", f"--key-file={self.folder}/munge.key",
                        f"--socket={self.folder}/munge.socket", f"--pid-file={self.folder}/munge.pid",
                        f"--log-file={self.folder}/munge.log", f"--seed-file={self.folder}/munge.seed")  # fmt: skip
            self._wait_until((self.folder / "munge.socket").exists)
            self._start("slurmctld", "-D", "-c")
            for node in NODES:
                self._start("slurmd", "-D", "-N", node, host=node)
            self._wait_until(lambda: self._idle_nodes() == len(NODES))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def ask(self, *command):
        """Run a command of Slurm; return what it prints."""
        environment = {**os.environ, **self.environment}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=30).stdout

    def facts_of(self, job_id):
        """Return the controller's data on a job: JobState, Restarts and more."""
        shown = self.ask("scontrol", "show", "job", str(job_id))
        return dict(pair.partition("=")[::2] for pair in shown.split())

    def _configure(self):
        (self.folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (self.folder / "munge.key").chmod(0o400)
        (self.folder / "state").mkdir()
        for node in NODES:
            (self.folder / f"spool-{node}").mkdir()
        names = "".join(f"127.0.0.1 {name}\n" for name in ("localhost", socket.gethostname(), *NODES))
        (self.folder / "hosts").write_text(names)
        host = socket.gethostname().split(".")[0]
        (self.folder / "slurm.conf").write_text(CONFIG.format(folder=self.folder, host=host, ports=free_ports(3)))

    def _start(self, program, *options, host=None):
        command = [_program(program), *options]
        if host is not None:
            # A separate host name and resolvable node names for the daemon and its child processes.
            prepare = f'mount --bind {self.folder}/hosts /etc/hosts && hostname {host} && exec "$@"'
            command = ["unshare", "--mount", "--uts", "sh", "-c", prepare, "sh", *command]
        with (self.folder / f"{program}-{host}.log").open("w") as log:
            environment = {**os.environ, **self.environment}
            self._daemons.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))

    def _idle_nodes(self):
        try:
            return self.ask("sinfo", "-h", "-N", "-p", "low", "-t", "idle", "-o", "%N").count("node")
        except subprocess.CalledProcessError:
            return 0  # the controller is not running yet

    def _wait_until(self, condition):
        wait_until(condition, 60, lambda: [f"{path.name}:\n{path.read_text()}" for path in self.folder.glob("*.log")])


def _program(name):
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
