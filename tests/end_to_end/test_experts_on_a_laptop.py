"""A mixture of experts on the devices of a laptop: four groups share the experts, then two, then one device has them all."""

import pytest
from command_line import STEPS, read_lines, run, trajectory

MIXTURE = (
    "--model.model_config={model_type: mixtral, expert_num: 4, num_experts_chosen: 2, "
    "capacity_factor: 1.0, aux_loss_types: [expert], aux_loss_factors: [0.01], z_loss_factor: 0.001}",
    "--lr_schedule.learning_rate=1e-3",  # a rate at which rounding does not grow
    "--optimizer.eps=1e-4",
)
GROUPS = {
    4: ("--use_parallel=true", "--batch_size=1", "--parallel_config={data_parallel: 4, expert_parallel: 4}"),
    2: ("--use_parallel=true", "--batch_size=1", "--parallel_config={data_parallel: 4, expert_parallel: 2}"),
    1: ("--batch_size=4",),
}
HALF = STEPS // 2


def assert_same(output, wanted, steps):
    """Losses, norms and tokens of experts of those steps."""
    found = trajectory(output)
    assert [record["step"] for record in found] == list(steps)
    for one, other in zip(found, trajectory(wanted)[steps.start - 1 :], strict=False):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["global_norm"] == pytest.approx(other["global_norm"], rel=1e-4)
        assert one["tokens"] == other["tokens"]
    loads = {record["step"]: record["experts"] for record in read_lines(wanted / "metrics.jsonl")}
    assert all(record["experts"] == loads[record["step"]] for record in read_lines(output / "metrics.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
def test_experts_of_four_groups_go_on_in_two_and_on_one_device(optimizer, config_file, tmp_path):
    mixture = (*MIXTURE, f"--optimizer.type={optimizer}")
    single = tmp_path / "single"
    run(config_file, single, *mixture, *GROUPS[1])
    assert any(load["dropped"] for record in read_lines(single / "metrics.jsonl") for load in record["experts"])
    four, checkpoint = tmp_path / "four", tmp_path / "four" / "checkpoint" / f"llm-{HALF}"
    run(config_file, four, *mixture, *GROUPS[4], f"--runner_config.stop_step={HALF}")
    assert_same(four, single, range(1, HALF + 1))
    for groups in (2, 1):
        output = tmp_path / f"from_{groups}"
        run(config_file, output, *mixture, *GROUPS[groups], f"--resume_training={checkpoint}")
        assert_same(output, single, range(HALF + 1, STEPS + 1))
