"""Simulations as forks of one process give what a process of their own gives; MindSpore leaves nothing where the command runs."""

import os
import re
from pathlib import Path

import pytest
from small_cluster import cluster_run

from mindllm.compiled.device.debug_information import MOST_INLINED
from mindllm.compiled.rank.compile_rank import compile_rank
from mindllm.compiled.simulation.simulate_rank import simulate_rank
from mindllm.config import load_config, override_config
from mindllm.dry_run.moments import own_bytes_of
from mindllm.dry_run.profile import profile_of
from mindllm.dry_run.simulations import Request, Simulations
from mindllm.dry_run.source_lines import lines_by_place
from mindllm.errors import UserError
from mindllm.reduced_runs.stage import reduce_to_layer

WRONG_SHARDING = """
import mindllm.parallel.build as build
from mindllm.parallel.sharding import on
table, bad = build.sharding_table, on(("dp", "tp"), ("tp", None))
wrong = {f"model.layers.0.feed_forward.w{number}.matmul": bad for number in "13"}
build.sharding_table = lambda *model: table(*model) | wrong
"""
WRITE_HOW_IT_COMPILES = """
import mindllm.compiled.simulation.simulate_rank as simulated
run_once = simulated._run_once
def write_lines(*arguments, **options):
    with open({file!r}, "a") as file:
        file.write(f"lines={{options.get('with_lines', False)}} ")
    return run_once(*arguments, **options)
simulated._run_once = write_lines
"""
FORMS = Path(__file__).resolve().parents[2] / "mindllm/verify/forms"
INPUTS = 8192  # bytes of the step's inputs, which the runtime brings when it likes: another moment may be the fullest of its kind


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with nothing in it; profiles are kept beside it."""
    directory = tmp_path / "work"
    directory.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(directory)
    return directory


def test_forks_give_what_new_processes_give(place):
    """The second fork finds parsed what the others parsed: source lines, and the other stage."""
    config = cluster_run(dp=2, pp=2, micro=2, model={"num_layers": 2})
    simulations = Simulations(1)
    simulations.prepare_source_lines(config)
    profiles = simulations.profiles([Request(config, rank, f"rank {rank}") for rank in (0, 2)])
    for rank, profile in zip((0, 2), profiles, strict=True):
        alone = profile_of(simulate_rank(config, rank))
        assert sizes(profile) == pytest.approx(sizes(alone), abs=INPUTS)
        assert blocks(profile) == blocks(alone)
        assert profile.messages == ()
    assert simulations.source_lines(config) == lines_by_place(compile_rank(reduce_to_layer(config), 0).sources)
    assert not list(place.iterdir())


def sizes(profile):
    return {kind: own_bytes_of(fill) for kind, fill in profile.moments.items()}


def blocks(profile):
    return sorted((one.node, one.size) for one in profile.largest if not one.use.is_input)


def test_what_a_fork_refuses_is_said_of_its_request(place):
    config = override_config(cluster_run(dp=2), {"context.device_target": "CPU"})
    with pytest.raises(UserError, match=r"a name: .*only Ascend devices are simulated"):
        Simulations(1).profiles([Request(config, 0, "a name")])


def test_what_is_refused_while_simulating_is_named_with_its_line(place, tmp_path, monkeypatch):
    """Simulations keep no lines of the source; what is refused is compiled again with them."""
    (tmp_path / "sitecustomize.py").write_text(WRONG_SHARDING)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with pytest.raises(UserError) as error:
        Simulations(1).profiles([Request(cluster_run(dp=2, tp=2), 0, "a name")])
    text = str(error.value)
    assert (
        "a name: simulating rank 0: MindSpore's compiler refuses the sharding of model.layers.0.feed_forward.w1" in text
    )
    assert re.search(r"models/linear\.py:\d+, called from mindllm/models/feed_forward\.py:\d+", text), text
    assert "Traceback" not in text


@pytest.fixture
def compiled(place, tmp_path, monkeypatch):
    """A file that receives how each fork compiles."""
    file = tmp_path / "compiled"
    (tmp_path / "sitecustomize.py").write_text(WRITE_HOW_IT_COMPILES.format(file=str(file)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return file


@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "forms",
    [
        ("biases_over_stages", "context_parallel_grouped_experts", "experts"),
        pytest.param(tuple(sorted(path.stem for path in FORMS.glob("*.yaml"))), marks=pytest.mark.slow),
    ],
    ids=["experts", "all"],
)
def test_nothing_is_compiled_twice(compiled, forms):
    """What the compiler can only interpret, as the slice of a tensor, needs lines of the source: it would end a first compile."""
    for form in forms:
        compiled.write_text("")
        Simulations(1).profiles([Request(load_config(FORMS / f"{form}.yaml"), 0, form)])
        assert (form, compiled.read_text()) == (form, "lines=False ")


def test_many_micro_batches_are_compiled_once(compiled):
    """Of more than 64 calls MindSpore makes graphs of their own, which it finds by lines: without them it ends in an error."""
    interleaved = {"pipeline_config": {"pipeline_interleave": True}}
    model = {"num_layers": 4, "pp_interleave_num": 2}
    config = cluster_run(pp=2, micro=MOST_INLINED // 2 + 2, model=model, parallel=interleaved)
    (profile,) = Simulations(1).profiles([Request(config, 0, "many")])
    assert (compiled.read_text(), profile.messages) == ("lines=False ", ())


def test_what_is_compiled_twice_is_said(compiled, tmp_path):
    with open(tmp_path / "sitecustomize.py", "a") as file:
        file.write("\nsimulated.can_leave_out_lines = lambda config: not Path(simulated.__file__).is_file()\n")
    (profile,) = Simulations(1).profiles([Request(cluster_run(dp=2), 0, "two")])
    assert compiled.read_text() == "lines=False lines=True "
    (message,) = profile.messages
    assert message.startswith("compiled twice, the second time with lines of the source: NameError: name 'Path'")
