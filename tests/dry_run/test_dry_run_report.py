"""What is shown: every megabyte of the peak, the lines users know, the object programs read."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from dry_run_cases import BACKWARD, GRADIENT, KEPT, STEP, WEIGHT, FormulaSimulations, pipeline
from rich.console import Console

from mindllm.compiled.graph.sources import SourceLine
from mindllm.compiled.simulation.memory_tracker import SOMAS
from mindllm.compiled.simulation.simulation import OTHER
from mindllm.config import override_config
from mindllm.dry_run.forecast import forecast_stages, simulate_stages
from mindllm.dry_run.moments import Use
from mindllm.dry_run.page import render_page
from mindllm.dry_run.report import about_fragments, json_report, log_lines, table
from mindllm.dry_run.run import DryRun
from mindllm.dry_run.source_lines import line_of, lines_by_place
from mindllm.dry_run.workspace import attention_elements_of, peak_with_workspace, workspace
from mindllm.models import linear
from mindllm.parallel.stages import stages_of
from mindllm.units import GIB, MIB, device_memory, gigabytes

LIMIT = 2000 * MIB
BLOCK = Use(OTHER, SOMAS, "", False)
LINES = {"model.layers.*.feed_forward.w1/MatMul": "linear.py:71"}


@pytest.fixture(scope="module")
def config():
    return pipeline(4, 32, 16)


@pytest.fixture(scope="module")
def memories(config):
    return simulate_stages(config, stages_of(config), FormulaSimulations())


def test_categories_add_up_to_the_peak(memories):
    for memory in memories:
        assert sum(memory.by_category.values()) == memory.used_peak
        assert memory.used_peak == memory.shown.used_peak


def test_the_object_for_programs_has_its_keys(memories):
    report = json.loads(json.dumps(json_report(memories, LIMIT)))
    assert list(report) == ["fits", "limit_mb", "stages"]
    assert report["limit_mb"] == 2000
    assert report["fits"] is False
    keys = ["stage", "rank", "layers", "weights_mb", "optimizer_mb", "gradients_mb", "activations_mb"]
    assert list(report["stages"][0]) == [*keys, "planned_mb", "used_peak_mb", "actual_peak_mb", "fits"]
    assert [stage["fits"] for stage in report["stages"]] == [False, False, True, True]
    assert report["stages"][0]["weights_mb"] == 240.0
    assert report["stages"][0]["planned_mb"] == 0


def test_a_log_ends_in_the_five_lines(memories, config):
    lines = log_lines(memories[0], config, 64 << 30, 58 << 30)
    peak = memories[0].used_peak // MIB
    assert lines[-5:] == [
        "Device MOC memory size: 65536M",
        "MindSpore Used memory size: 59392M",
        "MindSpore memory base address: 0",
        f"Used peak memory usage (without fragments): {peak}M",
        f"Actual peak memory usage (with fragments): {peak + 1}M",
    ]
    assert "a line of MindSpore" in lines


def test_the_table_has_a_row_for_each_stage(memories, config):
    console = Console(width=300, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table(memories, config, LIMIT))
    text = console.export_text()
    assert "at its peak, GB of 2^30 bytes (limit 1.95 GB, none reserved)" in text
    assert " GB short" in text
    assert text.count("fits") == 2
    gb = gigabytes(memory.actual_peak for memory in memories)
    for memory in memories:
        assert gb(memory.used_peak) in text


def test_a_device_has_no_gaps_between_blocks(memories, config):
    """A limit between the used peak and the peak with fragments: the stage fits, on devices that remap idle pages."""
    gapped = replace(memories[0], actual_peak=memories[0].used_peak + 100 * MIB)
    limit = gapped.used_peak + 50 * MIB
    within = override_config(config, {"context.max_device_memory": f"{limit / GIB:.6f}GB"})
    run = DryRun(within, (gapped,))
    assert run.fits
    assert run.tree()["stages"][0]["fits"]
    assert any("never set MS_ALLOC_CONF=enable_vmm:False" in str(part) for part in run.parts())
    assert about_fragments([gapped.actual_peak], [gapped.device_peak], gapped.actual_peak) is None
    short = override_config(config, {"context.max_device_memory": f"{(gapped.used_peak - MIB) / GIB:.6f}GB"})
    assert not DryRun(short, (gapped,)).fits


def test_the_page_attributes_every_megabyte(memories, config):
    page = render_page(memories, config, LIMIT, LINES)
    assert "http" not in page
    assert "<script" not in page
    tables = re.findall(r"<h3>What is alive at the peak</h3><table>(.*?)</table>", page)
    assert len(tables) == 4
    for memory, text in zip(memories, tables, strict=True):
        *rows, total = [float(size) for size in re.findall(r"<tr[^>]*><td>([\d.]+)</td>", text)]
        assert sum(rows) == pytest.approx(total, abs=0.0005 * len(rows))
        assert total == pytest.approx(memory.used_peak / GIB, abs=0.0006)
    assert "linear.py:71" in page
    assert page.count("largest blocks") == 4


def test_the_page_says_what_is_extrapolated(config):
    long = pipeline(8, 80, 64)
    page = render_page(forecast_stages(long, stages_of(long), FormulaSimulations()), long, LIMIT, {})
    assert page.count("extrapolated") == 8
    assert page.count("of the largest of the smaller simulations") == 8
    assert "largest blocks" not in page


def test_workspace_is_an_estimate_of_its_own(memories, config):
    heads, rows, width = 4 + 2 * 2, 32, 16
    gradient = 40 * MIB + 4 * 2 * rows * heads * width
    elements = attention_elements_of(config)
    assert workspace("FlashAttentionScoreGrad", elements) == gradient
    assert workspace("MatMul", elements) == 16 * MIB
    assert workspace("Mul", elements) == 0
    for memory in memories:
        assert (
            peak_with_workspace(memory.moments, elements) == memory.used_peak + gradient
        )  # the peak is at that operator
    assert peak_with_workspace({STEP: {WEIGHT: 10}}, elements) == 10


def test_lines_are_found_by_layer_and_operator():
    stack = (SourceLine("/a/decoder.py", 52, ""), SourceLine("/a/linear.py", 71, ""))
    scope = "Default/network-SeededLoss/network-CausalLM/model-Decoder/layers-CellList/0-DecoderLayer/w1-Linear/"
    lines = lines_by_place({scope + "MatMul-op0": stack, scope + "Cast-op3": stack[:1]})
    path = "model.layers.*.w1"
    assert line_of(Use("activations", path, "MatMul", True), lines) == "linear.py:71"
    assert line_of(Use("activations", path, "Transpose", True), lines) == "decoder.py:52"
    assert line_of(KEPT, lines) == ""


def test_lines_of_parameters_are_those_that_make_them():
    file = Path(linear.__file__)
    scope = "Default/network-CausalLM/model-Decoder/layers-CellList/0-DecoderLayer/w1-Linear/MatMul-op0"
    lines = lines_by_place({scope: (SourceLine(str(file), 71, ""),)})
    text = file.read_text().splitlines()
    for copy in ("", "accu_grads.", "adam_v."):
        name, _, line = line_of(Use("weights", f"{copy}model.layers.*.w1.weight", "", False), lines).partition(":")
        assert name == "linear.py"
        assert text[int(line) - 1].strip().startswith("self.weight = ")
    assert line_of(Use("weights", "model.layers.*.w1.other", "", False), lines) == ""


class Planned(FormulaSimulations):
    """What layers keep, and a gradient, lie in one block, with 5 MB that only other moments of the plan need."""

    def profiles(self, requests):
        found = super().profiles(requests)
        for one in found:
            kept = one.moments[BACKWARD].pop(KEPT)
            gradient = one.moments[BACKWARD].pop(GRADIENT)
            one.moments[BACKWARD][BLOCK] = kept + gradient + 5 * MIB
            object.__setattr__(one, "planned", {KEPT: kept, GRADIENT: gradient})
        return found


def test_planned_memory_is_told_by_what_lies_in_it(config):
    """As with memory_optimize_level O1, where MindSpore's tracker tells of one block."""
    (plain,) = simulate_stages(config, stages_of(config)[:1], FormulaSimulations())
    for find in (simulate_stages, forecast_stages):
        (memory,) = find(config, stages_of(config)[:1], Planned())
        assert memory.used_peak == plain.used_peak + 5 * MIB
        assert memory.by_category == {**plain.by_category, OTHER: plain.by_category[OTHER] + 5 * MIB}
        assert memory.planned_bytes == plain.peak[KEPT] + plain.peak[GRADIENT] + 5 * MIB
        text = f"stage 0: {device_memory(memory.planned_bytes)} of it are blocks that MindSpore plans"
        assert text in "\n".join(log_lines(memory, config, 64 << 30, 58 << 30))
        assert text in render_page([memory], config, LIMIT, LINES)
        (stage,) = json_report([memory], LIMIT)["stages"]
        assert stage["planned_mb"] == memory.planned_bytes / MIB


def test_tokens_that_are_sent_say_for_which_routing_figures_hold(memories, config):
    sizes = {"parallel_config.data_parallel": 2, "parallel_config.expert_parallel": 2}
    model = {
        "expert_num": 4,
        "num_experts_chosen": 2,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
    }
    sends = override_config(config, {**{f"model.model_config.{key}": value for key, value in model.items()}, **sizes})
    assert sends.sends_tokens
    told = "figures hold for balanced routing"
    for run, is_told in ((config, False), (sends, True)):
        found = DryRun(run, tuple(memories))
        assert any(told in part for part in found.parts() if isinstance(part, str)) == is_told
        assert ("holds_for" in found.tree()) == is_told
        assert any(told in line for line in log_lines(memories[0], run, 64 << 30, LIMIT)) == is_told
        assert (told in render_page(memories, run, LIMIT, {})) == is_told
