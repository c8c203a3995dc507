"""Section ``monitor_config`` of MindFormers (its ``TrainingStateMonitor``, 1.3 to 2.1), key by key, and ``monitor`` of PyNative.

Figures that mindllm has too are computed as the section asks; what each of the others is told by is said by name.
"""

from __future__ import annotations

from mindllm.mindformers.keys.rules import Table, decided, idle, only

SECTION = "monitor_config"
ON, INTERVAL = "monitor_on", "step_interval"
BY_GROUP = "by group of layers, over all devices, in place of each rank's part of each weight"
FIGURES = {"local_norm_format": BY_GROUP, "weight_state_format": BY_GROUP, "max_attention_logit_format": ""}
"""Those that mindllm has under the same key."""

LOSS = "metrics.jsonl has the loss over all tokens of a step, and no part of one"
ALL_WEIGHTS = "figures are of all weights, by group of layers"
OTHERS = {
    "dump_path": "figures go through no files on the way: metrics.jsonl and the trackers of callbacks have them",
    "target": ALL_WEIGHTS,
    "invert": ALL_WEIGHTS,
    "local_loss_format": LOSS,
    "device_local_loss_format": LOSS,
    "device_local_norm_format": "metrics.jsonl has global_norm over all devices; local_norm_format has it by group of layers",
    "optimizer_state_format": "norms of moments are not computed; update_ratio_format has what they do to the weights",
    "throughput_baseline": "metrics.jsonl has tokens per second, which nothing is compared with",
    "stable_rank_config": "stable ranks of weights are not computed",
    "global_norm_spike_threshold": "no spike ends a run; runner_wrapper.skip_spikes leaves such steps out",
    "global_norm_spike_count_threshold": "no spike ends a run; runner_wrapper.skip_spikes leaves such steps out",
}
ENDING = {
    "print_struct": "the run would end once the names of its weights are printed; write false",
    "check_for_global_norm": "no run ends at a spike here; write false, and runner_wrapper.skip_spikes in a YAML of mindllm, "
    "which leaves such steps out",
    "health_checkpoint": "no run ends at a spike here, and checkpoints are checked by checksums; leave it out",
}
"""By which a run ends there."""

MONITOR: Table = {
    f"{SECTION}.{ON}": decided(f"{SECTION}.{ON}", "false where none of the figures is one that mindllm has"),
    f"{SECTION}.{INTERVAL}": decided(f"{SECTION}.{INTERVAL}"),
    **{f"{SECTION}.{name}": decided(f"{SECTION}.{name}", reason) for name, reason in FIGURES.items()},
    **{f"{SECTION}.{name}": idle(reason) for name, reason in OTHERS.items()},
    **{f"{SECTION}.{name}": only(False, None, reason="off", otherwise=why) for name, why in ENDING.items()},
}
MONITOR |= {f"{SECTION}.{name}.*": MONITOR[f"{SECTION}.{name}"] for name in ("stable_rank_config", "health_checkpoint")}

GRADIENT = "monitor_config.local_norm_format of mindllm has the norm of gradients by group of layers"
PYNATIVE_MONITOR: Table = {
    "monitor.train_state.local_norm": idle(GRADIENT),
    "monitor.train_state.device_norm": idle(GRADIENT),
    "monitor.train_state.local_loss": idle(LOSS),
    "monitor.train_state.device_loss": idle(LOSS),
    "monitor.tensorboard.*": idle("it only watches; callbacks: TensorBoard writes event files"),
    "monitor.moe_monitor.*": idle("it only watches; metrics.jsonl has the loads of experts"),
    "monitor.health_checkpoint.*": idle("MindFormers' PyNative trainer reads it nowhere"),
    "monitor.*": idle("it only watches; metrics.jsonl and monitor_config of mindllm have such figures"),
}
