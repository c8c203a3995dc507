"""Pods know their place in a job, rank tables are read, and manifests have the form that their definitions ask for."""

import json
import os
from pathlib import Path

import jsonschema
import pytest
import yaml

from mindllm.cli.launch import main
from mindllm.errors import UserError
from mindllm.launch.clusters.kubernetes import pod_of_a_job, read_rank_table
from mindllm.launch.clusters.schedulers import placement_of
from mindllm.launch.start import Launch, placed

ROOT = Path(__file__).resolve().parents[3]
RUN = f"train --config {ROOT / 'configs/llama2/pretrain_llama2_13b_16p.yaml'}"
OPERATOR = {
    "MS_WORKER_NUM": "16",
    "MS_LOCAL_WORKER": "8",
    "MS_NODE_RANK": "1",
    "MS_SCHED_HOST": "10.96.0.7",
    "MS_SCHED_PORT": "2222",
    "MS_ROLE": "MS_WORKER",
    "MINDX_TASK_ID": "4f1c",
}
VOLCANO = {
    "VC_TASK_INDEX": "1",
    "VC_WORKER_NUM": "2",
    "VC_WORKER_HOSTS": "run-worker-0.run,run-worker-1.run",
    "MINDLLM_JOB": "run",
}


def table(**changes):
    servers = [
        {
            "server_id": f"192.168.0.{number}",
            "container_ip": f"10.0.0.{number}",
            "device": [{"device_id": str(n), "device_ip": "1.1.1.1", "rank_id": str(2 * place + n)} for n in range(2)],
        }
        for place, number in ((1, 8), (0, 9))  # the operator does not sort them
    ]
    written = {"status": "completed", "version": "1.0", "server_count": "2", "server_list": servers} | changes
    Path("hccl.json").write_text(json.dumps(written))
    return {"RANK_TABLE_FILE": "hccl.json"}


def test_a_pod_of_the_ascend_operator_has_its_place():
    place = placement_of(OPERATOR)
    assert (place.tasks, place.task, place.address, place.port) == (2, 1, "10.96.0.7", 2222)
    launch = placed(Launch(("job.py",), 16, 16, Path("log"), Path("log"), msrun=True), place)
    assert (launch.local_workers, launch.node_rank, launch.first_device, launch.msrun) == (8, 1, 0, True)
    assert launch.job == "ascendjob-4f1c"


def test_a_pod_of_volcano_has_its_place():
    place = pod_of_a_job(VOLCANO, find={"run-worker-0.run": "10.1.1.1"}.get)
    assert (place.tasks, place.task, place.address, place.job) == (2, 1, "10.1.1.1", "run")


@pytest.mark.parametrize("address", ["192.168.0.8", "10.0.0.8"])
def test_a_server_of_a_rank_table_has_its_place(address):
    place = placement_of({**table(), "POD_IP": address})
    assert (place.tasks, place.task, place.address) == (2, 1, "10.0.0.9")


def test_ranks_that_a_script_has_numbered_are_left_alone():
    assert placement_of({**table(), "POD_IP": "10.0.0.8", "RANK_ID": "2"}) is None


def test_a_rank_table_is_read_in_the_order_of_ranks():
    assert [server.ranks for server in read_rank_table(table()["RANK_TABLE_FILE"])] == [(0, 1), (2, 3)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"status": "initializing"}, "not complete after 0 s"),
        ({"server_list": [{"server_id": "a", "device": [{"rank_id": "1"}]}]}, "ranks are not 0, 1, 2"),
        ({"server_list": [{"server_id": "a", "device": []}]}, "is no rank table"),
        ({"server_list": [{"device": [{"rank_id": "0"}]}]}, "is no rank table"),
        ({"server_list": 3}, "is no rank table"),
        ({"server_list": [{"server_id": "a", "device": [{"rank_id": "99999999999"}]}]}, "is no rank table"),
    ],
)
def test_what_is_no_finished_rank_table_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        read_rank_table(table(**changes)["RANK_TABLE_FILE"], seconds=0)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (OPERATOR | {"MS_WORKER_NUM": "12"}, "no multiple of MS_LOCAL_WORKER 8"),
        (OPERATOR | {"MS_SCHED_PORT": "x"}, "MS_SCHED_PORT is 'x'"),
        (OPERATOR | {"MS_SCHED_HOST": ""}, "MS_SCHED_HOST is missing"),
        (VOLCANO | {"VC_TASK_INDEX": "2"}, "VC_WORKER_HOSTS names 2 pods"),
    ],
)
def test_variables_that_do_not_fit_are_named(environment, message):
    with pytest.raises(UserError, match=message):
        pod_of_a_job(environment, find=lambda host: "10.0.0.1")


def test_a_server_that_the_rank_table_does_not_name_is_told():
    with pytest.raises(UserError, match=r"no server is this one \(value 10\.0\.0\.1\); set POD_IP"):
        placement_of({**table(), "POD_IP": "10.0.0.1"})


STRING, COUNT, LABELS = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "object"}


def closed(*required, **properties):
    """An object that has these fields and no other: a cluster drops or refuses what a definition does not have."""
    return {"type": "object", "additionalProperties": False, "required": [*required], "properties": properties}


def several(**properties):
    return {"type": "array", "items": closed(*properties, **properties)}


REF = closed("fieldRef", fieldRef=closed("fieldPath", fieldPath=STRING))
CONTAINER = closed(
    "name",
    "image",
    name={"const": "ascend"},
    image=STRING,
    command={"type": "array", "items": STRING},
    args={"type": "array", "items": STRING},
    env={"type": "array", "items": closed("name", name=STRING, value=STRING, valueFrom=REF)},
    ports=several(name={"const": "ascendjob-port"}, containerPort=COUNT),
    resources=closed("requests", "limits", requests=LABELS, limits=LABELS),
    workingDir=STRING,
    volumeMounts=several(name=STRING, mountPath=STRING),
)
APART = several(topologyKey=STRING, labelSelector=closed("matchLabels", matchLabels=LABELS))
POD = closed(
    "metadata",
    "spec",
    metadata=closed(labels=LABELS),
    spec=closed(
        "containers",
        affinity=closed(podAntiAffinity=closed(requiredDuringSchedulingIgnoredDuringExecution=APART)),
        automountServiceAccountToken={"type": "boolean"},
        terminationGracePeriodSeconds=COUNT,
        containers={"type": "array", "items": CONTAINER, "minItems": 1},
        volumes={"type": "array"},
        restartPolicy={"enum": ["Never", "OnFailure"]},
    ),
)
HEAD = {"metadata": closed("name", "labels", name={"pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}, labels=LABELS)}
POLICY = closed("action", action=STRING, event=STRING, events={"type": "array", "items": STRING})
REPLICA = closed("replicas", "template", replicas=COUNT, restartPolicy={"const": "Never"}, template=POD)
SCHEMAS = {
    "volcano": closed(
        **HEAD,
        apiVersion={"const": "batch.volcano.sh/v1alpha1"},
        kind={"const": "Job"},
        spec=closed(
            "tasks",
            schedulerName={"const": "volcano"},
            minAvailable=COUNT,
            maxRetry=COUNT,
            queue=STRING,
            plugins={"type": "object", "additionalProperties": {"type": "array"}},
            policies={"type": "array", "items": POLICY},
            tasks=several(name=STRING, replicas=COUNT, template=POD),
        ),
    ),
    "ascendjob": closed(
        **HEAD,
        apiVersion={"const": "mindxdl.gitee.com/v1"},
        kind={"const": "AscendJob"},
        spec=closed(
            "replicaSpecs",
            schedulerName={"const": "volcano"},
            runPolicy=closed(backoffLimit=COUNT, schedulingPolicy=closed(minAvailable=COUNT, queue=STRING)),
            successPolicy={"enum": ["", "AllWorkers"]},
            replicaSpecs=closed("Scheduler", Scheduler=REPLICA, Worker=REPLICA),
        ),
    ),
}
"""What the manifests use of the public definitions, in our words; the whole definitions: the test below."""


def written(capsys, kind, *options):
    assert main(["--kubernetes", kind, "--image=mindllm:1", "--claim=shared:/job", *options, RUN]) == 0
    return yaml.safe_load(capsys.readouterr().out)


@pytest.mark.parametrize("kind", SCHEMAS)
@pytest.mark.parametrize("options", [[], ["--restart=3", "--setup=source set_env.sh"], ["--local_workers=16"]])
def test_a_manifest_has_the_form_of_its_kind(capsys, kind, options):
    jsonschema.validate(written(capsys, kind, *options), SCHEMAS[kind])


DEFINITIONS = os.environ.get("MINDLLM_CRDS", "")


@pytest.mark.slow
@pytest.mark.skipif(not DEFINITIONS, reason="MINDLLM_CRDS names no directory with the YAMLs of the public definitions")
@pytest.mark.parametrize("kind", SCHEMAS)
@pytest.mark.parametrize("options", [[], ["--restart=3", "--setup=source set_env.sh"], ["--local_workers=16"]])
def test_a_manifest_has_the_form_of_the_public_definition(capsys, kind, options):
    manifest = written(capsys, kind, *options)
    files = Path(DEFINITIONS).glob("*.yaml")
    documents = [document for file in files for document in yaml.safe_load_all(file.read_text()) if document]
    name = f"{manifest['kind'].lower()}s.{manifest['apiVersion'].partition('/')[0]}"
    (found,) = [document for document in documents if document["metadata"]["name"] == name]
    (version,) = [one for one in found["spec"]["versions"] if one["name"] == manifest["apiVersion"].partition("/")[2]]
    jsonschema.validate(manifest, strict(version["schema"]["openAPIV3Schema"]))


def strict(schema):
    """The schema, with fields that it does not have refused: a cluster drops them in silence."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: strict(value) for key, value in schema.items()}
    preserved = schema.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema and not preserved:
        inner["additionalProperties"] = False
    return inner


def test_pods_of_volcano_are_the_nodes_of_the_run(capsys):
    spec = written(capsys, "volcano", "--restart=2", "--notice=60", "--setup=source set_env.sh")["spec"]
    (task,) = spec["tasks"]
    pod = task["template"]["spec"]
    assert (spec["minAvailable"], task["name"], task["replicas"], spec["maxRetry"]) == (2, "worker", 2, 2)
    assert {"env", "svc"} == set(spec["plugins"])
    assert pod["terminationGracePeriodSeconds"] == 60
    assert pod["containers"][0]["resources"]["limits"] == {"huawei.com/Ascend910": 8}
    command = f"source set_env.sh\nexec python -m mindllm launch --workers=16 '{RUN}'"
    assert pod["containers"][0]["args"] == [command]


def test_the_scheduler_of_an_ascend_job_is_node_0(capsys):
    replicas = written(capsys, "ascendjob")["spec"]["replicaSpecs"]
    assert {name: replica["replicas"] for name, replica in replicas.items()} == {"Scheduler": 1, "Worker": 1}
    assert replicas["Scheduler"]["template"] == replicas["Worker"]["template"]
    one = written(capsys, "ascendjob", "--local_workers=16")["spec"]["replicaSpecs"]
    assert list(one) == ["Scheduler"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kubernetes=volcano", RUN], "--kubernetes requires --image"),
        (["--kubernetes=volcano", "--image=a", "--claim=shared", RUN], "CLAIM:/DIRECTORY"),
        (["--kubernetes=volcano", "--image=a", "--time=1:00:00", RUN], "--time requires --slurm"),
        (["--slurm", "--image=a", RUN], "--image requires --kubernetes"),
        (["--slurm", "--kubernetes=volcano", RUN], "--slurm and --kubernetes exclude each other"),
        (["--slurm", "--notice=0", RUN], "at least 1"),
    ],
)
def test_what_cannot_be_written_is_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        main(arguments)
