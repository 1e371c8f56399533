"""Kubernetes: a plan as a JobSet, one pod a node, made anew as a whole when its state is saved or a machine is lost.

Fields are those of jobset.x-k8s.io/v1alpha2 and of the pods of batch/v1 in it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from meshwright.run.launching.ask import PORT, RESTARTS, Ask
from meshwright.run.launching.command import node_command
from meshwright.run.launching.shares import Share, shares
from meshwright.run.launching.yaml_text import yaml_text
from meshwright.spec.errors import ConfigError, ExitCode, Problem
from meshwright.spec.plan import Design

_CONTAINER = "meshwright"
_DESIGN_FOLDER = "/etc/meshwright"
_CONFIG_BYTES = 2**20  # what the API server takes of one ConfigMap
_APPLIED_BYTES = 2**18  # what the notes on a document hold, in which `kubectl apply` keeps all of it
_REST_BYTES = 1024  # of it for what is not the design
_ATTEMPT = "MESHWRIGHT_ATTEMPT"
_ATTEMPT_LABEL = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"


def manifest(design: Design, ask: Ask, *, found: Sequence[Share], grace: int) -> str:
    """What `kubectl apply` takes: the design and the JobSet. Raises ConfigError where the design is too large."""
    return "---\n".join(yaml_text(document) for document in documents(design, ask, found=found, grace=grace))


def documents(design: Design, ask: Ask, *, found: Sequence[Share], grace: int) -> tuple[dict[str, Any], ...]:
    """As `manifest`, of plain values."""
    text = _design_text(design)
    if len(text) > _CONFIG_BYTES:
        what = f"the design has {len(text):,} bytes and a ConfigMap holds {_CONFIG_BYTES:,}"
        fix = f"put it into {ask.run} as design.json, and leave --design and the ConfigMap out of the manifest"
        raise ConfigError(Problem(what=what, where="--on kubernetes", fix=fix))
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(ask, f"{ask.name}-design"),
        "data": {"design.json": text},
    }
    return config, _jobset(ask, found=found, grace=grace)


def notes(design: Design, *, nodes: int) -> tuple[str, ...]:
    """What is not in the manifest and what the plan rests on."""
    found = []
    if nodes > 1 and any(share.accelerator for share in shares(design)):
        found.append(
            "pods have the cluster's plain network, which is not the one that is predicted: for RDMA add your device"
            " plugin's resource (rdma/ib: 1, vpc.amazonaws.com/efa: 32) to limits, IPC_LOCK to"
            " securityContext.capabilities.add, and hostNetwork: true with dnsPolicy: ClusterFirstWithHostNet where"
            " its adapters are the host's alone"
        )
    size = len(json.dumps(_design_text(design)))
    if size > _APPLIED_BYTES - _REST_BYTES:
        found.append(
            f"`kubectl apply` refuses a design of {size:,} bytes, since it keeps it in a note of {_APPLIED_BYTES:,}:"
            " use `kubectl apply --server-side -f`"
        )
    return tuple(found)


def _design_text(design: Design) -> str:
    """The design without a space that nobody needs, since `kubectl apply` keeps it twice."""
    return json.dumps(json.loads(design.to_json()), separators=(",", ":")) + "\n"


def _jobset(ask: Ask, *, found: Sequence[Share], grace: int) -> dict[str, Any]:
    groups = [list(each) for _, each in groupby(found, key=lambda share: (share.group, share.count))]
    head = f"{ask.name}-{_job_name(0)}-0-0.{ask.name}:{PORT}"
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(ask, ask.name),
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": ask.name, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": RESTARTS if ask.restarts is None else ask.restarts,
                "rules": [
                    {
                        "name": "saved",
                        "action": "RestartJobSetAndIgnoreMaxRestarts",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": [
                {
                    "name": _job_name(index),
                    "replicas": 1,
                    "template": {"spec": _job(ask, group, nodes=len(found), head=head, grace=grace)},
                }
                for index, group in enumerate(groups)
            ],
        },
    }


def _job(ask: Ask, group: Sequence[Share], *, nodes: int, head: str, grace: int) -> dict[str, Any]:
    """One pod for each node of the group; the first that saves, or is put out, has all of them begun anew."""
    return {
        "completionMode": "Indexed",
        "parallelism": len(group),
        "completions": len(group),
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": [int(ExitCode.SAVED)]},
                },
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {"spec": _pod(ask, group[0], nodes=nodes, head=head, grace=grace)},
    }


def _pod(ask: Ask, share: Share, *, nodes: int, head: str, grace: int) -> dict[str, Any]:
    volume, folder = ask.mount
    command = node_command(
        ask.run,
        python=ask.python or "python",
        node="JOB_COMPLETION_INDEX",
        nodes=str(nodes),
        head=head,
        session=f"{ask.name}-$({_ATTEMPT})",
        design=f"{_DESIGN_FOLDER}/design.json",
        first_node=share.node,
    )
    attempt = {"fieldRef": {"fieldPath": _ATTEMPT_LABEL}}
    mounts: list[dict[str, Any]] = [
        {"name": "run", "mountPath": folder},
        {"name": "design", "mountPath": _DESIGN_FOLDER, "readOnly": True},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace,
        "containers": [
            {
                "name": _CONTAINER,
                "image": ask.image,
                "command": command,
                "env": [{"name": _ATTEMPT, "valueFrom": attempt}],
                "ports": [{"containerPort": PORT}],
                "resources": _resources(share),
                "volumeMounts": mounts,
            }
        ],
        "volumes": [
            {"name": "run", "persistentVolumeClaim": {"claimName": volume}},
            {"name": "design", "configMap": {"name": f"{ask.name}-design"}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _resources(share: Share) -> dict[str, Any]:
    if share.accelerator:
        return {"limits": {share.accelerator: share.count}}
    return {"requests": {"cpu": str(share.cores), "memory": str(share.memory_bytes)}}


def _metadata(ask: Ask, name: str) -> dict[str, Any]:
    return {"name": name} | ({"namespace": ask.namespace} if ask.namespace else {})


def _job_name(index: int) -> str:
    return f"nodes{index}"
