"""What Slurm tells a task about its job, and what is asked of Slurm's commands."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from rlpost.errors import ClusterError

COMMAND_TIMEOUT_S = 60.0
TERM_PATIENCE_S = 20.0  # SIGKILL follows after 30 s by default (KillWait); closing needs the rest
WAY_OUT = (
    "submit it (-m hydra/launcher=submitit_slurm), or write its sbatch script with "
    "cluster.render=true"
)


@dataclass(frozen=True)
class SlurmTask:
    """One task of a job step: `srun` starts one on each node.

    Task 0 of 2 on n1 and n2:

        SlurmTask("1234", "0", num_restarts=0, number=0, num_tasks=2, num_nodes=2,
                  node_names="n[1-2]")
    """

    job_id: str
    step_id: str
    num_restarts: int
    number: int
    num_tasks: int
    num_nodes: int
    node_names: str

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> SlurmTask:
        """Raises ClusterError outside of a job, and in a job's script without srun."""
        if "SLURM_JOB_ID" not in environment:
            raise ClusterError(f"cluster=slurm: this is no Slurm job; {WAY_OUT}")
        if "SLURM_STEP_ID" not in environment:
            raise ClusterError(
                "cluster=slurm: Slurm started one process for the whole job; put `srun` before "
                "`python launch.py`, so that it starts one on each node"
            )
        return cls(
            job_id=environment["SLURM_JOB_ID"],
            step_id=environment["SLURM_STEP_ID"],
            num_restarts=int(environment.get("SLURM_RESTART_COUNT", 0)),
            number=int(environment["SLURM_PROCID"]),
            num_tasks=int(environment["SLURM_STEP_NUM_TASKS"]),
            num_nodes=int(environment["SLURM_STEP_NUM_NODES"]),
            node_names=environment["SLURM_STEP_NODELIST"],
        )

    @property
    def name(self) -> str:
        """Tells this start of the step from all others."""
        return f"{self.job_id}.{self.step_id}.{self.num_restarts}"

    @property
    def leads(self) -> bool:
        return self.number == 0

    def check(self, num_nodes: int) -> None:
        """Raises ClusterError unless there is one task on each of `num_nodes` nodes."""
        if self.num_nodes != num_nodes:
            raise ClusterError(
                f"cluster.num_nodes ({num_nodes}) is not what Slurm gave ({self.num_nodes}); set "
                f"cluster.num_nodes={self.num_nodes}, or submit with --nodes={num_nodes}"
            )
        if self.num_tasks != self.num_nodes:
            raise ClusterError(
                f"Slurm started {self.num_tasks} tasks on {self.num_nodes} nodes; it has to be "
                "one on each (--ntasks-per-node=1)"
            )

    def own_address(self) -> str:
        """Address of this node in the network of the job's nodes."""
        if self.num_nodes == 1:
            return "127.0.0.1"
        names = _command("scontrol", "show", "hostnames", self.node_names).split()
        other = names[1] if self.number == 0 else names[0]
        return address_toward(_node_address(other))

    def requeue(self) -> None:
        """Raises ClusterError with Slurm's reason, e.g. that the job may not be requeued."""
        _command("scontrol", "requeue", self.job_id)


def lends_its_node(environment: Mapping[str, str]) -> bool:
    """Whether this is a task of a Slurm step that another one leads."""
    return int(environment.get("SLURM_PROCID", 0)) > 0


def was_requeued(environment: Mapping[str, str]) -> bool:
    """Whether Slurm starts this job's command once more."""
    return int(environment.get("SLURM_RESTART_COUNT", 0)) > 0


def term_patience_s(environment: Mapping[str, str]) -> float | None:
    """How long SIGTERM leaves a run to finish its step; None outside of a job: not at all."""
    return TERM_PATIENCE_S if "SLURM_JOB_ID" in environment else None


def address_toward(peer: str) -> str:
    """The address of ours from which `peer` is reached. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, 9))
        except OSError as error:
            raise ClusterError(f"no way to the node {peer}: {error}") from error
        return str(probe.getsockname()[0])


def _node_address(name: str) -> str:
    """As Slurm knows the node: an address, or a name that can be resolved."""
    said = _command("scontrol", "show", "node", name, "--oneliner")
    found = re.search(r"NodeAddr=(\S+)", said)
    return found[1] if found else name


def _command(*words: str) -> str:
    try:
        return subprocess.run(
            words, capture_output=True, text=True, check=True, timeout=COMMAND_TIMEOUT_S
        ).stdout
    except subprocess.CalledProcessError as error:
        raise ClusterError(f"{' '.join(words)}: {error.stderr.strip()}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"{' '.join(words)}: {error}") from error
