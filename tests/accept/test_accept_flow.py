"""What is run, in which order, what comes of it, and what leaves the machine: the runs themselves are stand-ins here."""

import getpass
import json
import socket
import zipfile
from dataclasses import replace

import pytest
from profile_maker import Maker, Plants

from mindllm.accept import accept as flow
from mindllm.accept import archive, node_states
from mindllm.accept.accept import reason_of
from mindllm.accept.claims import CLAIMS, chosen
from mindllm.accept.expected import Peak, of_part_nodes, timed
from mindllm.accept.measured import alone, measured
from mindllm.accept.nodes import NodeLost, Nodes
from mindllm.accept.runs import SIZES
from mindllm.cli import accept as command
from mindllm.errors import RunFailed, UserError
from mindllm.preflight import node as node_module
from mindllm.timing.device import DEFAULT, read_device
from mindllm.timing.shipped import DEVICES
from mindllm.train.metrics_file import METRICS_NAME, MetricsFile
from mindllm.units import MIB

USED = 1500 * MIB
PRIVATE = (
    "buildbox-17",
    "marianne",
    "/home/marianne/secret",
    "10.11.12.13",
    "HUSH_TOKEN",
    "tr0ub4dor",
    "fe80::1ff:fe23",
)


class Machine:
    """A node with devices on which every run is as predicted, but for what is planted."""

    def __init__(self, monkeypatch, here, tmp_path):
        self.ran, self.loss, self.peak, self.step, self.plants = [], {}, {}, {}, {}
        self.fails, self.extra, self.used = {}, {}, 8
        monkeypatch.setattr(flow, "execute", self.execute)
        monkeypatch.setattr(flow, "peak_of", lambda config, simulations: Peak(USED, USED))
        monkeypatch.setattr(flow, "simulations_here", lambda: None)
        monkeypatch.setattr(node_module, "visible_devices", lambda: here)
        monkeypatch.setattr(node_states, "ASK_SECONDS", 0.0)
        monkeypatch.setattr(flow.CheckpointStore, "newest", lambda store: tmp_path / "checkpoint")
        monkeypatch.setattr(flow, "override_config", self.override)

    def override(self, config, keys):
        """A stand-in of a checkpoint is nothing that a run could resume."""
        from mindllm.config import override_config

        return override_config(config, {key: value for key, value in keys.items() if key != "resume_training"})

    def execute(self, config, nodes=None):
        name = config.output_dir.rpartition("/")[2]
        self.ran.append(name)
        if name in self.fails:
            raise self.fails[name]
        seconds = 0.5
        if config.context.device_target == "Ascend":
            step = timed(config, of_part_nodes(read_device(DEFAULT), self.used, 8)).step
            seconds = step.seconds * self.step.get(name, 1.0)
            Maker(step, self.plants.get(name, Plants())).write(flow.Path(config.output_dir) / "profile")
        with MetricsFile(flow.Path(config.output_dir) / METRICS_NAME) as file:
            for number in range(1, config.runner_config.train_steps + 1):
                loss = 5.5 - 0.05 * number + self.loss.get(name, 0.0)
                file.append(
                    {"step": number, "loss": loss, "step_time_s": seconds, **self.of_device(config, name), **self.extra}
                )
        return measured(config)

    def of_device(self, config, name):
        on_device = config.context.device_target == "Ascend"
        return {"used_peak_bytes": round(self.peak.get(name, 1.0) * USED)} if on_device else {}


@pytest.fixture
def node(monkeypatch, tmp_path):
    return Machine(monkeypatch, 8, tmp_path)


@pytest.fixture
def laptop(monkeypatch, tmp_path):
    return Machine(monkeypatch, 0, tmp_path)


def run(tmp_path, capsys, *arguments):
    """Exit code, the object that is printed, and the texts of page and archive by name."""
    output = tmp_path / "accept"
    code = command.main(["--output", str(output), "--json", *arguments])
    tree = json.loads(capsys.readouterr().out)
    with zipfile.ZipFile(output / "acceptance.zip") as archive:
        members = {name: archive.read(name).decode() for name in archive.namelist()}
    assert members["acceptance.html"] == (output / "acceptance.html").read_text()
    return code, tree, members


def verdicts(tree):
    return {claim["claim"]: claim["verdict"] for claim in tree["claims"]}


def refuted(tree):
    return [(line["claim"], line["figure"]) for line in tree["lines"] if line["verdict"] == "refuted"]


def test_on_devices_that_are_as_predicted_all_eight_are_confirmed(node, tmp_path, capsys):
    code, tree, members = run(tmp_path, capsys)
    assert code == 0
    assert verdicts(tree) == dict.fromkeys([claim.name for claim in CLAIMS], "confirmed")
    assert {line["verdict"] for line in tree["lines"]} == {"confirmed"}
    assert node.ran == [
        *("reference", "single", "dp", "tp", "pp", "reference_experts", "ep", "optimizer", "recompute"),
        *("resume_begins", "resume"),
    ]
    assert tree["target"] == "Ascend"
    assert {"acceptance.html", "acceptance.json", "runs/ep.jsonl", "runs/reference.jsonl"} <= set(members)
    assert not (tmp_path / "accept" / "runs").exists()


PLANTED = {
    ("dp", "loss"): {"loss": {"dp": 1e-2}},
    ("tp", "used peak"): {"peak": {"tp": 1.2}},
    ("pp", "step"): {"step": {"pp": 1.2}},
    ("single", "kernels"): {"plants": {"single": Plants(ranks={0: 2.0})}},
    ("dp", "bandwidth of AllReduce over dp"): {"plants": {"dp": Plants(exchanges={("AllReduce", "dp"): 2.0})}},
}


@pytest.mark.parametrize("where", PLANTED)
def test_what_is_planted_is_refuted_and_nothing_else(where, node, tmp_path, capsys):
    vars(node).update(PLANTED[where])
    code, tree, members = run(tmp_path, capsys, "--claims", "single,dp,tp,pp")
    assert code == 3
    assert refuted(tree) == [where]
    assert ">refuted<" in members["acceptance.html"]


def test_a_peak_is_not_run_where_no_device_is_and_why_is_said(laptop, tmp_path, capsys):
    code, tree, members = run(tmp_path, capsys, "--claims", "single,tp")
    assert code == 0
    assert verdicts(tree) == {"single": "not judged", "tp": "confirmed"}
    peak = next(line for line in tree["lines"] if line["figure"] == "used peak")
    assert (peak["predicted"], peak["measured"], peak["verdict"]) == (USED, None, "not run")
    assert peak["why"] == "no device: processes of this CPU"
    assert laptop.ran == ["reference", "tp"], "one device of a CPU is what the others are compared with"
    assert "No Ascend device is here" in members["acceptance.html"]


@pytest.mark.parametrize(
    ("here", "devices", "why"),
    [(0, "1", "needs 2 devices, and 1 was asked for (--devices)"), (1, "8", "needs 8 devices, and 1 are here")],
)
def test_a_claim_that_needs_more_devices_than_there_are_is_not_run(here, devices, why, monkeypatch, tmp_path, capsys):
    machine = Machine(monkeypatch, here, tmp_path)
    code, tree, _ = run(tmp_path, capsys, "--devices", devices, "--claims", "dp,recompute")
    assert code == 0
    assert verdicts(tree) == {"dp": "not run", "recompute": "confirmed"}
    assert tree["lines"][0]["why"] == why
    assert "dp" not in machine.ran


def test_where_no_claim_could_be_run_the_command_fails(laptop, tmp_path, capsys):
    assert run(tmp_path, capsys, "--devices", "1", "--claims", "dp")[0] == 1


def test_a_run_that_fails_is_named_and_the_others_go_on(node, tmp_path, capsys):
    node.fails = {"dp": RunFailed("RuntimeError: HCCL EI0006 of 10.11.12.13 in /home/marianne/secret")}
    code, tree, _ = run(tmp_path, capsys, "--claims", "dp,tp")
    assert code == 1
    assert verdicts(tree) == {"dp": "failed", "tp": "confirmed"}
    assert tree["lines"][0]["why"] == "RunFailed, exit code 1, it said RuntimeError, EI0006"


def test_a_reference_that_fails_is_not_tried_for_every_claim(node, tmp_path, capsys):
    node.fails = {"reference": RunFailed("no")}
    code, tree, _ = run(tmp_path, capsys, "--claims", "dp,tp,ep")
    assert (code, verdicts(tree)) == (1, {"dp": "failed", "tp": "failed", "ep": "confirmed"})
    assert node.ran == ["reference", "reference_experts", "ep"]


def test_a_device_that_was_not_profiled_has_failed_lines(node, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(flow, "recorded", lambda config, device: None)
    code, tree, _ = run(tmp_path, capsys, "--claims", "dp")
    assert code == 1
    assert [line["figure"] for line in tree["lines"] if line["verdict"] == "failed"] == [
        "kernels", "bandwidth of AllReduce over dp",
    ]  # fmt: skip


def test_other_files_below_runs_stay(node, tmp_path, capsys):
    """With ``--output .`` they may be runs of the user."""
    (own := tmp_path / "accept" / "runs" / "mine" / "weights").parent.mkdir(parents=True)
    own.write_text("months of training")
    run(tmp_path, capsys, "--claims", "dp")
    assert own.read_text() == "months of training"
    assert [path.name for path in (tmp_path / "accept" / "runs").iterdir()] == ["mine"]


def test_ctrl_c_keeps_what_is_done(node, tmp_path, capsys):
    node.fails = {"tp": KeyboardInterrupt()}
    code, tree, _ = run(tmp_path, capsys, "--claims", "dp,tp,pp")
    assert code == 130
    assert verdicts(tree) == {"dp": "confirmed", "tp": "not run", "pp": "not run"}
    assert [line["why"] for line in tree["lines"][-2:]] == ["stopped while it ran", "stopped before"]
    assert tree["interrupted"]


def test_page_and_archive_are_there_after_each_claim(node, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(archive, "write_acceptance", lambda found, directory: seen.append(len(found.took)) or ("", ""))
    command.main(["--output", str(tmp_path / "accept"), "--json", "--claims", "dp,tp"])
    assert seen == [1, 2, 2]


def test_nothing_private_is_in_page_and_archive(node, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HUSH_TOKEN", "tr0ub4dor")
    monkeypatch.setattr(socket, "gethostname", lambda: "buildbox-17")
    device = tmp_path / "marianne.yaml"
    described = (DEVICES / f"{DEFAULT}.yaml").read_text()
    device.write_text(described.replace("name: Atlas 800T A2", "name: buildbox-17"))
    said = f"Traceback in {', '.join(PRIVATE)}: HUSH_TOKEN=tr0ub4dor EJ0001 RuntimeError on {socket.gethostname()}"
    node.fails = {"tp": RunFailed(said), "pp": UserError(said), "ep": OSError(said)}
    node.extra = {"host": "buildbox-17", "path": "/home/marianne/secret", "slowest_rank": 3}
    code, tree, members = run(tmp_path, capsys, "--device", str(device), "--keep")
    assert code == 1
    assert read_device(str(device)).name == "buildbox-17"
    assert [name for name, verdict in verdicts(tree).items() if verdict == "failed"] == ["tp", "pp", "ep"]
    assert (tmp_path / "accept" / "runs" / "dp" / METRICS_NAME).read_text().count("buildbox-17"), "it was planted"
    own = [str(tmp_path), "/work/", "/tmp/", "/root", getpass.getuser() + "@", socket.getfqdn()]
    for name, text in {**members, "names": " ".join(members)}.items():
        assert [word for word in (*PRIVATE, *own) if word and word in text] == [], name
    with zipfile.ZipFile(tmp_path / "accept" / "acceptance.zip") as archive:
        assert {item.date_time for item in archive.infolist()} == {(2020, 1, 1, 0, 0, 0)}


class TwoNodes(Nodes):
    """Both are there; of the other one this is what its preflight says."""

    def checked(self):
        return [[("devices", "good"), ("shared directory", "no")]]


def run_on_two(tmp_path, devices, *claims, here=8):
    """Two nodes: what is found, and the page."""
    output = tmp_path / "accept"
    place = replace(alone(output, here > 0), workers=devices, local_workers=devices // 2)
    wanted = flow.Wanted(chosen(claims), devices, read_device(DEFAULT), output, here=here, nodes=2)
    found = flow.accept(wanted, nodes=TwoNodes(place, here))
    return found, archive.render_page(found)


def test_two_nodes_with_eight_devices_each_are_one_acceptance(node, tmp_path):
    found, page = run_on_two(tmp_path, 16)
    assert {claim: found.verdict(claim).value for claim in found.claims} == {c.name: "confirmed" for c in CLAIMS}
    assert "16 Ascend devices on 2 nodes" in page
    assert "runs of one device were on node 0" in page
    links = [(line.claim, line.figure) for line in found.lines if line.figure.startswith("bandwidth")]
    assert {("tp", "bandwidth of AllGather over tp inside a node"), ("tp", "bandwidth of AllReduce over dp between nodes"),
            ("dp", "bandwidth of AllReduce over dp inside and between nodes")} < set(links)  # fmt: skip


@pytest.mark.parametrize(
    ("slow", "refuted"),
    [
        (("AllReduce", "dp"), "bandwidth of AllReduce over dp between nodes"),
        (("ReduceScatter", "tp"), "bandwidth of ReduceScatter over tp inside a node"),
    ],
)
def test_a_slow_link_between_nodes_is_told_from_one_inside(slow, refuted, node, tmp_path):
    node.plants = {"tp": Plants(exchanges={slow: 2.0})}
    found, _ = run_on_two(tmp_path, 16, "tp")
    assert [line.figure for line in found.lines if line.verdict.value == "refuted"] == [refuted]


def test_links_of_nodes_that_are_used_in_part_are_those_between_them(node, tmp_path):
    """Four of eight devices of each node: a description of the device takes ranks 0 to 7 to be one node."""
    node.used = 4
    found, _ = run_on_two(tmp_path, 8, "tp")
    rates = {line.figure: line.predicted for line in found.lines if line.figure.startswith("bandwidth")}
    assert rates["bandwidth of AllReduce over dp between nodes"] == pytest.approx(0.8 * 25e9, rel=0.05), "RoCE"
    assert found.verdict("tp").value == "confirmed"


def test_preflight_of_every_node_is_on_the_page(laptop, tmp_path):
    found, page = run_on_two(tmp_path, 2, "dp", here=0)
    assert "<tr><th></th><th>node 0</th><th>node 1</th></tr>" in page
    assert "<tr><td>shared directory</td><td>–</td><td>no</td></tr>" in page
    assert "<tr><td>MindSpore</td><td>good</td><td>–</td></tr>" in page
    assert {"node": 1, "subject": "shared directory", "state": "no"} in found.tree()["preflight"]
    assert "preflight of node 1 says no to: shared directory" in list(found.parts())
    assert "Replicas were processes of all 2 nodes. Where devices share the model, node 0 executed all ranks" in page


def test_a_node_that_was_lost_is_said_on_the_page(laptop, tmp_path):
    laptop.fails = {"dp": NodeLost([1], "rank 1 on buildbox-17 was lost with its node")}
    found, page = run_on_two(tmp_path, 2, "dp", "tp", here=0)
    assert [(line.claim, line.why) for line in found.lines if line.verdict.value == "failed"] == [
        ("dp", "node 1 was lost")
    ]
    assert found.verdict("tp").value == "confirmed"
    assert "buildbox" not in page


def test_nodes_whose_devices_make_no_mesh_are_told_so(node, tmp_path):
    claim, wanted = chosen(["pp"])[0], flow.Wanted(CLAIMS, 24, read_device(DEFAULT), tmp_path, here=8, nodes=3)
    assert wanted.obstacle(claim) == (
        "MindSpore compiles for 1, 2, 4 or a multiple of 8, of all and of a stage, and 3 nodes have 8 each"
    )
    assert not wanted.obstacle(chosen(["dp"])[0])
    fewer = replace(wanted, here=4)
    assert fewer.obstacle(chosen(["dp"])[0]) == "needs 8 devices on each node, and 4 are here"


def test_a_reason_has_no_words_of_others():
    assert reason_of(UserError("no such host: buildbox-17")) == "UserError, exit code 2"
    assert (
        reason_of(OSError("ConnectionRefusedError EI0002 EI0002")) == "OSError, it said ConnectionRefusedError, EI0002"
    )


def test_a_claim_that_is_none_is_wrong_input():
    with pytest.raises(UserError, match="did you mean 'optimizer'"):
        chosen(["optimiser"])


def test_runs_of_failed_claims_stay_and_others_go(node, tmp_path, capsys):
    node.fails = {"resume": RunFailed("no")}
    run(tmp_path, capsys, "--claims", "dp,resume")
    runs = tmp_path / "accept" / "runs"
    assert [path.name for path in runs.iterdir()] == ["resume_begins"]
    run(tmp_path, capsys, "--claims", "dp", "--keep")
    assert (runs / "dp" / METRICS_NAME).exists()


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
@pytest.mark.parametrize("target", SIZES)
@pytest.mark.parametrize("devices", [2, 3, 4, 8, 16])
def test_every_layout_trains_on_the_same_batch(claim, target, devices, tmp_path):
    shape = claim.shape(devices)
    config = flow.run_of(claim, shape, SIZES[target], target, tmp_path / "c", tmp_path)
    assert config.global_batch_size == 8
    assert config.parallel_config.device_num == shape.devices <= min(devices, 8)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
@pytest.mark.parametrize(
    ("nodes", "devices", "taken", "batch"),
    [(2, 2, 2, 8), (2, 6, 4, 8), (2, 16, 16, 16), (3, 24, 24, 24), (4, 32, 32, 32), (6, 48, 48, 48)],
)
def test_every_layout_of_several_nodes_trains_on_the_same_batch(claim, nodes, devices, taken, batch, tmp_path):
    shape = claim.shape(devices, nodes)
    if not claim.fits(shape):
        assert (claim.name, nodes) == ("pp", 3)
        return
    config = flow.run_of(claim, shape, SIZES["Ascend"], "Ascend", tmp_path / "c", tmp_path)
    assert config.global_batch_size == batch
    assert config.parallel_config.device_num == (taken if claim.several else 1)
    assert shape.local * nodes == taken or not claim.several
    assert config.parallel_config.model_parallel <= max(2, shape.local), "tensor-parallel ranks stay inside a node"
