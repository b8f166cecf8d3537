"""The command, script or manifest that starts a configuration on its cluster."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from typing import Any, Literal

import yaml

from crossdock.launch.config import Job
from crossdock.scratch.errors import ConfigError

__all__ = ["KubernetesKind", "Rendezvous", "kubernetes", "mpirun", "slurm", "torchrun"]

Rendezvous = Literal["static", "c10d"]
KubernetesKind = Literal["jobset", "pytorchjob", "mpijob"]

PORT = 29500


def torchrun(job: Job, rendezvous: Rendezvous = "static") -> str:
    """A script to run on every node."""
    cluster = job.config.cluster
    if cluster.nodes == 1:
        launch = ["torchrun", "--standalone", "--nproc-per-node", str(cluster.ranks_per_node)]
        return _script("On the machine:", [_command(launch + _program(job))])
    sizes = ["--nnodes", str(cluster.nodes), "--nproc-per-node", str(cluster.ranks_per_node)]
    if rendezvous == "static":
        head = f"On every node, with NODE_RANK 0 to {cluster.nodes - 1} and MASTER_ADDR node 0:"
        lines = [': "${NODE_RANK:?0 on the first node}" "${MASTER_ADDR:?the first node}"']
        place = '--node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR"'
        place += f" --master-port {PORT}"
    else:
        head = "On every node, with HEAD_ADDR one of them:"
        lines = [': "${HEAD_ADDR:?one of the nodes}"']
        place = (
            f'--rdzv-backend c10d --rdzv-id {_dns_name(job)} --rdzv-endpoint "$HEAD_ADDR:{PORT}"'
        )
    lines.append(_command(["torchrun", *sizes], place, _program(job)))
    return _script(head, lines)


def mpirun(job: Job, hosts: Sequence[str] = ()) -> str:
    """A script with a hostfile; Open MPI, and MPICH's words as a comment."""
    cluster = job.config.cluster
    names = list(hosts) or [f"node{index}" for index in range(cluster.nodes)]
    if len(names) != cluster.nodes:
        raise ConfigError(f"{len(names)} host(s), but cluster.nodes = {cluster.nodes}: name each")
    ranks, per_node = str(cluster.num_ranks), cluster.ranks_per_node
    exports = ["-x", "PATH", "-x", "LD_LIBRARY_PATH"]
    program = ["python", *_program(job)]
    open_mpi = ["mpirun", "-n", ranks, "--hostfile", "hosts", "--map-by", "slot", "--bind-to"]
    return _script(
        "On the first node; ranks meet through mpi4py (pip install 'crossdock[mpi]').",
        [
            "cat > hosts <<'END'",
            *(f"{name} slots={per_node}" for name in names),
            "END",
            _command([*open_mpi, "none", *exports, *program]),
            "# MPICH, hosts as lines of node:ranks:",
            f"# mpirun -n {ranks} -ppn {per_node} -f hosts {_command(program)}",
        ],
    )


def slurm(job: Job) -> str:
    """A script for sbatch."""
    cluster = job.config.cluster
    options = {
        "job-name": _dns_name(job),
        "nodes": cluster.nodes,
        "ntasks-per-node": cluster.ranks_per_node,
        "distribution": "block",
    }
    if cluster.device == "cuda":
        options["gpus-per-node"] = cluster.ranks_per_node
    srun = ["srun", "--distribution=block", "--kill-on-bad-exit=1", "--export=ALL"]
    head = [f"#SBATCH --{name}={value}" for name, value in options.items()]
    return _script(None, [*head, "set -euo pipefail", _command([*srun, "python", *_program(job)])])


def kubernetes(job: Job, kind: KubernetesKind, image: str) -> str:
    """A manifest: JobSet or PyTorchJob (torchrun inside), or MPIJob (mpirun inside)."""
    manifests: dict[KubernetesKind, Callable[[Job, str], dict[str, Any]]] = {
        "jobset": _jobset,
        "pytorchjob": _pytorchjob,
        "mpijob": _mpijob,
    }
    text: str = yaml.safe_dump(manifests[kind](job, image), sort_keys=False, width=100)
    return text


def _jobset(job: Job, image: str) -> dict[str, Any]:
    cluster, name = job.config.cluster, _dns_name(job)
    # Pods of an Indexed Job that JobSet makes: <set>-<job>-<replica>-<index>.<subdomain>.
    launch = [
        "torchrun",
        *("--nnodes", str(cluster.nodes), "--nproc-per-node", str(cluster.ranks_per_node)),
        *("--node-rank", "$(JOB_COMPLETION_INDEX)", "--master-addr", f"{name}-ranks-0-0.{name}"),
        *("--master-port", str(PORT)),
    ]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": {"maxRestarts": 0},
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "replicatedJobs": [
                {
                    "name": "ranks",
                    "replicas": 1,
                    "template": {
                        "spec": {
                            "parallelism": cluster.nodes,
                            "completions": cluster.nodes,
                            "completionMode": "Indexed",
                            "backoffLimit": 0,
                            "template": {"spec": _pod(job, image, launch + _program(job))},
                        }
                    },
                }
            ],
        },
    }


def _pytorchjob(job: Job, image: str) -> dict[str, Any]:
    cluster = job.config.cluster
    # The operator sets PET_NNODES, PET_NODE_RANK and the master's address, which torchrun reads.
    launch = ["torchrun", "--nproc-per-node", str(cluster.ranks_per_node)]
    template = {"spec": _pod(job, image, launch + _program(job), container="pytorch")}
    replicas = {"Master": {"replicas": 1, "restartPolicy": "Never", "template": template}}
    if cluster.nodes > 1:
        replicas["Worker"] = replicas["Master"] | {"replicas": cluster.nodes - 1}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": _dns_name(job)},
        "spec": {
            "nprocPerNode": str(cluster.ranks_per_node),
            "runPolicy": {"backoffLimit": 0, "cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": json.loads(json.dumps(replicas)),  # copies: no YAML aliases
        },
    }


def _mpijob(job: Job, image: str) -> dict[str, Any]:
    cluster = job.config.cluster
    launch = ["mpirun", "-n", str(cluster.num_ranks), "--map-by", "slot", "--bind-to", "none"]
    launch += ["python", *_program(job)]
    launcher = {
        "restartPolicy": "Never",
        "containers": [{"name": "mpi", "image": image, "command": launch}],
    }
    workers = _pod(job, image, None)
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": {"name": _dns_name(job)},
        "spec": {
            "slotsPerWorker": cluster.ranks_per_node,
            "mpiImplementation": "OpenMPI",
            "runPolicy": {"backoffLimit": 0, "cleanPodPolicy": "Running"},
            "mpiReplicaSpecs": {
                "Launcher": {"replicas": 1, "template": {"spec": launcher}},
                "Worker": {"replicas": cluster.nodes, "template": {"spec": workers}},
            },
        },
    }


def _pod(
    job: Job, image: str, command: list[str] | None, container: str = "crossdock"
) -> dict[str, Any]:
    cluster = job.config.cluster
    spec: dict[str, Any] = {"name": container, "image": image}
    if command is not None:
        spec["command"] = command
    if cluster.device == "cuda":
        spec["resources"] = {"limits": {"nvidia.com/gpu": cluster.ranks_per_node}}
    spec["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]
    # NCCL needs more than the 64 MiB of a container's default; our shm transport needs none of it.
    volumes = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    return {"restartPolicy": "Never", "containers": [spec], "volumes": volumes}


def _program(job: Job) -> list[str]:
    return ["-m", "crossdock.launch", "run", str(job.path), *job.overrides]


def _command(*parts: Sequence[str] | str) -> str:
    """Arguments to quote, and text that is quoted already."""
    return " ".join(part if isinstance(part, str) else shlex.join(part) for part in parts)


def _script(comment: str | None, lines: Sequence[str]) -> str:
    head = ["#!/usr/bin/env bash"] + ([f"# {comment}"] if comment else [])
    return "\n".join([*head, *lines]) + "\n"


def _dns_name(job: Job) -> str:
    """The job's name as Kubernetes and Slurm take it."""
    letters = [c if c.isascii() and c.isalnum() else "-" for c in job.config.name.lower()]
    return "crossdock-" + "".join(letters).strip("-")[:40]
