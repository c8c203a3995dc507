"""The manifest of a run on Kubernetes: a Job of Volcano, or an AscendJob of MindCluster's Ascend operator.

Fields are those of their CustomResourceDefinitions: ``batch.volcano.sh/v1alpha1`` and ``mindxdl.gitee.com/v1``. No cluster was at
hand: manifests are held against these schemas, and were never applied.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mindllm.errors import UserError

VOLCANO, ASCEND_JOB = "volcano", "ascendjob"
KINDS = (VOLCANO, ASCEND_JOB)
DEVICE = "huawei.com/Ascend910"
DRIVER = "/usr/local/Ascend/driver"
CONTAINER, PORT_NAME, PORT = "ascend", "ascendjob-port", 2222  # the operator looks for these names
SCHEDULER = "volcano"
HARDWARE = {"ring-controller.atlas": "ascend-910b"}


@dataclass(frozen=True)
class KubernetesJob:
    """What the manifest says.

    Attributes:
        name: of the job: letters, digits and hyphens.
        command: what each pod runs.
        nodes: pods, each on a node of its own.
        devices: of each pod.
        image: of the container, with CANN, MindSpore and mindllm.
        claims: PersistentVolumeClaims and the directories that they are mounted at; the first is the working directory.
        restart: how often a job that fails is started again.
        notice: seconds for a checkpoint when a pod is to end.
        setup: lines of shell before the command.
    """

    name: str
    command: Sequence[str]
    nodes: int
    devices: int
    image: str
    claims: Sequence[tuple[str, str]] = ()
    restart: int = 0
    notice: int = 300
    setup: Sequence[str] = ()

    def text(self, kind: str) -> str:
        """Return the manifest of a job of :data:`KINDS`."""
        tree = self.volcano() if kind == VOLCANO else self.ascend_job()
        import yaml  # which --help does not wait for

        repeated = json.loads(json.dumps(tree))  # or what occurs twice were written as a reference
        return str(yaml.safe_dump(repeated, sort_keys=False, width=130))

    def volcano(self) -> dict[str, Any]:
        """Return the Job of Volcano: its pods start together, and all again when one fails."""
        events = [{"events": ["PodEvicted", "PodFailed"], "action": "RestartJob"}] if self.restart else []
        job_name = {"fieldRef": {"fieldPath": "metadata.labels['volcano.sh/job-name']"}}
        return {
            "apiVersion": "batch.volcano.sh/v1alpha1",
            "kind": "Job",
            "metadata": {"name": self.name, "labels": HARDWARE},
            "spec": {
                "schedulerName": SCHEDULER,
                "minAvailable": self.nodes,
                "maxRetry": self.restart,
                "queue": "default",
                "plugins": {"env": [], "svc": []},
                "policies": [*events, {"event": "TaskCompleted", "action": "CompleteJob"}],
                "tasks": [
                    {
                        "name": "worker",
                        "replicas": self.nodes,
                        "template": self._pod(
                            {"volcano.sh/job-name": self.name},
                            [{"name": "MINDLLM_JOB", "valueFrom": job_name}],
                            {"restartPolicy": "Never"},
                        ),
                    }
                ],
            },
        }

    def ascend_job(self) -> dict[str, Any]:
        """Return the AscendJob: its Scheduler has devices as the workers have, and is node 0."""
        template = self._pod({"job-name": self.name}, [], {})
        replicas = {"Scheduler": 1} | ({"Worker": self.nodes - 1} if self.nodes > 1 else {})
        faults = {"fault-scheduling": "grace", "fault-retry-times": str(self.restart)} if self.restart else {}
        return {
            "apiVersion": "mindxdl.gitee.com/v1",
            "kind": "AscendJob",
            "metadata": {"name": self.name, "labels": {"framework": "mindspore", **HARDWARE, **faults}},
            "spec": {
                "schedulerName": SCHEDULER,
                "runPolicy": {
                    "backoffLimit": self.restart,
                    "schedulingPolicy": {"minAvailable": self.nodes, "queue": "default"},
                },
                "successPolicy": "AllWorkers",
                "replicaSpecs": {
                    name: {"replicas": count, "restartPolicy": "Never", "template": template}
                    for name, count in replicas.items()
                },
            },
        }

    def _pod(self, of_job: dict[str, str], variables: list[dict[str, Any]], more: dict[str, Any]) -> dict[str, Any]:
        """Return a pod that runs the command, on a node where no other pod of the job is."""
        devices = {DEVICE: self.devices}
        visible = {"fieldRef": {"fieldPath": f"metadata.annotations['{DEVICE}']"}}  # for the Ascend Docker Runtime
        mounts = [*self.claims, ("driver", DRIVER), ("shm", "/dev/shm")]
        apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": of_job}}
        volumes: list[dict[str, Any]] = [
            {"name": claim, "persistentVolumeClaim": {"claimName": claim}} for claim, _ in self.claims
        ]
        volumes += [
            {"name": "driver", "hostPath": {"path": DRIVER}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ]
        container = {
            "name": CONTAINER,
            "image": self.image,
            "command": ["/bin/bash", "-c"],
            "args": ["\n".join([*self.setup, f"exec {shlex.join(self.command)}"])],  # so that SIGTERM reaches it
            "env": [
                {"name": "ASCEND_VISIBLE_DEVICES", "valueFrom": visible},
                {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                *variables,
            ],
            "ports": [{"name": PORT_NAME, "containerPort": PORT}],
            "resources": {"requests": dict(devices), "limits": dict(devices)},
            **({"workingDir": self.claims[0][1]} if self.claims else {}),
            "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts],
        }
        spec = {
            "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}},
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": self.notice,
            "containers": [container],
            "volumes": volumes,
        }
        return {"metadata": {"labels": {**HARDWARE, **of_job}}, "spec": {**spec, **more}}


def claim_of(text: str) -> tuple[str, str]:
    """Return the claim and the directory of ``CLAIM:/DIRECTORY``; raises UserError for anything else."""
    claim, colon, path = text.partition(":")
    if not claim or not colon or not path.startswith("/") or claim in ("driver", "shm"):
        raise UserError(f"--claim {text}: write CLAIM:/DIRECTORY, a PersistentVolumeClaim and where it is mounted")
    return claim, path
