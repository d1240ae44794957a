"""A real Slurm of two nodes on this one machine: `python one_machine.py start|stop FOLDER`.

Both nodes, `n1` and `n2`, are this host under two names, at one address. Partition `urgent` takes
nodes from `main`, whose jobs are then requeued. There is no accounting: ask squeue and scontrol.
As on most sites, jobs are control groups where this machine lets us make some, so that signals but
SIGKILL reach the tasks alone; their names are those of the nodes, so there can be one such Slurm.
`start` prints the configuration file, to be exported as SLURM_CONF; it needs root and Debian's
packages `slurm-wlm` and `munge`. State and logs lie in FOLDER.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

NODES = ("n1", "n2")
CPUS = 8  # as declared; Slurm counts them and binds nobody to them
MEMORY_MB = 8000
FREEZER = "/sys/fs/cgroup/freezer"
START_TIMEOUT_S = 30.0
CONTROLLER, DAEMON, MUNGE = "slurmctld", "slurmd", "munged"


def start(folder: Path) -> Path:
    """Brings both nodes up. A cluster that already answers under `folder` is left alone."""
    if missing := [name for name in (CONTROLLER, DAEMON, MUNGE) if shutil.which(name) is None]:
        raise SystemExit(f"{', '.join(missing)} not found; apt install slurm-wlm munge")
    conf = folder / "slurm.conf"
    os.environ["SLURM_CONF"] = str(conf)
    if conf.exists() and idle() == len(NODES):
        return conf
    for name in ("state", "log"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    conf.write_text(configuration(folder))
    conf.with_name("cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    start_munge()
    subprocess.run([CONTROLLER], check=True)
    for node in NODES:
        subprocess.run([DAEMON, "-N", node], check=True)
    wait_until(lambda: idle() == len(NODES), f"the nodes are not idle; see {folder / 'log'}")
    return conf


def stop(folder: Path) -> None:
    """Ends the daemons that `start` began."""
    pids = [int(file.read_text()) for file in folder.glob("*.pid") if file.read_text().strip()]
    for pid in filter(alive, pids):
        os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not any(map(alive, pids)), f"daemons are still there: {pids}")


def configuration(folder: Path) -> str:
    host = socket.gethostname().split(".")[0]
    controller, *daemons = free_ports(1 + len(NODES))
    nodes = [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} "
        f"RealMemory={MEMORY_MB} State=UNKNOWN"
        for name, port in zip(NODES, daemons, strict=True)
    ]
    every = ",".join(NODES)
    settings = {
        "ClusterName": "onemachine",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": controller,
        "AuthType": "auth/munge",
        "CryptoType": "crypto/munge",
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "slurmd-%n.pid",
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool-%n",
        "SlurmctldLogFile": folder / "log" / "slurmctld.log",
        "SlurmdLogFile": folder / "log" / "slurmd-%n.log",
        "SlurmdParameters": "config_overrides",  # CPUs as declared, not as found
        "ProctrackType": f"proctrack/{'cgroup' if os.access(FREEZER, os.W_OK) else 'linuxproc'}",
        "TaskPlugin": "task/none",
        "MpiDefault": "none",
        "SwitchType": "switch/none",
        "ReturnToService": 2,
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU",
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "sched_interval=2,bf_interval=2",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "SlurmctldParameters": "preempt_send_user_signal",
        "JobRequeue": 1,
        "KillWait": 30,
    }
    partitions = [
        f"PartitionName=main Nodes={every} Default=YES MaxTime=60 State=UP PriorityTier=1 "
        "GraceTime=60",
        f"PartitionName=urgent Nodes={every} MaxTime=60 State=UP PriorityTier=10",
    ]
    return "\n".join([*(f"{key}={value}" for key, value in settings.items()), *nodes, *partitions])


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for probe in sockets:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in sockets]
    finally:
        for probe in sockets:
            probe.close()


def start_munge() -> None:
    """The daemon that signs Slurm's messages, as the user that its package made."""
    if subprocess.run(["munge", "-n"], capture_output=True).returncode == 0:
        return
    socket_folder = Path("/run/munge")
    socket_folder.mkdir(parents=True, exist_ok=True)
    shutil.chown(socket_folder, "munge", "munge")
    subprocess.run(["runuser", "-u", "munge", "--", shutil.which(MUNGE) or MUNGE], check=True)


def idle() -> int:
    """Nodes that would take a job now."""
    command = ["sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D"]
    said = subprocess.run(command, capture_output=True, text=True)
    return int(said.stdout.strip() or 0) if said.returncode == 0 else 0


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def wait_until(holds: Callable[[], bool], message: str) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    while not holds():
        if time.monotonic() > end:
            raise SystemExit(message)
        time.sleep(0.2)


if __name__ == "__main__":
    action, place = sys.argv[1:]
    os.environ["PATH"] += os.pathsep + "/usr/sbin"
    if action == "start":
        print(start(Path(place).absolute()))
    elif action == "stop":
        stop(Path(place).absolute())
    else:
        raise SystemExit(f"{action}: start or stop")
