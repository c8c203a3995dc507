"""Keys of MindFormers about the update and what watches it: optimizer, lr_schedule, runner_wrapper, callbacks."""

from __future__ import annotations

from mindllm.mindformers.keys.rules import Table, decided, idle, only, refused, used

SAVED_WHOLE = "a checkpoint holds whole parameters with the optimizer's state, written by one rank"
EXPERTS = "the keys of experts say how they are balanced; their tokens are in the metrics"
STEPS = "MindFormers' graphs do five Newton-Schulz steps, whatever a YAML says; write 5"

UPDATE: Table = {
    "optimizer.type": decided("optimizer.type"),
    "optimizer.betas": decided("optimizer.betas"),
    "optimizer.beta1": decided("optimizer.betas: [beta1, beta2]"),
    "optimizer.beta2": decided("optimizer.betas: [beta1, beta2]"),
    "optimizer.eps": decided("optimizer.eps"),
    "optimizer.weight_decay": decided("optimizer.weight_decay"),
    "optimizer.learning_rate": decided("lr_schedule.learning_rate"),
    "optimizer.use_fused": idle("the update is always one kernel per weight"),
    "optimizer.use_fused_adamw": idle("the update is always one kernel per weight"),
    "optimizer.swap": idle("optimizer state stays on the device here, and the dry run counts it"),
    "optimizer.amsgrad": only(False, None, reason="off", otherwise="AdamW has no amsgrad here"),
    "optimizer.maximize": only(False, None, reason="off", otherwise="the loss is made small"),
    **{
        f"optimizer.{key}": decided(f"optimizer.{ours}")
        for key, ours in {
            "adamw_betas": "betas",
            "adamw_eps": "eps",
            "matched_adamw_rms": "matched_adamw_rms",
            "momentum": "momentum",
            "nesterov": "nesterov",
        }.items()
    },
    "optimizer.comm_strategy": idle("matrices are always put together whole, and every rank keeps its own part"),
    "optimizer.ns_steps": only(5, None, reason="what it does anyway", otherwise=STEPS),
    "optimizer.ns_coefficients": refused(
        "MindFormers' graphs have the coefficients of Jordan et al., whatever a YAML says"
    ),
    "optimizer.qk_clip_enabled": decided("optimizer.qk_clip_threshold, or null"),
    "optimizer.qk_clip_threshold": decided("optimizer.qk_clip_threshold"),
    "optimizer.micro_batch_num": idle("the largest logit is that of all micro-batches whatever their number"),
    "lr_schedule.type": decided("lr_schedule.type"),
    "lr_schedule.learning_rate": used(),
    "lr_schedule.lr_end": decided("lr_schedule.lr_end"),
    "lr_schedule.warmup_ratio": decided("lr_schedule.warmup_ratio"),
    "lr_schedule.warmup_steps": decided("lr_schedule.warmup_steps"),
    "lr_schedule.warmup_lr_init": used(),
    "lr_schedule.total_steps": used(),
    "lr_schedule.power": used(),
    "lr_schedule.num_cycles": decided("lr_schedule.num_cycles"),
    "lr_schedule.decay_ratio": decided("lr_schedule.decay_ratio"),
    "lr_schedule.decay_start_steps": decided("lr_schedule.decay_ratio"),
    "lr_schedule.decay_start_ratio": decided("lr_schedule.decay_ratio"),
    "lr_schedule.decay_steps": refused("schedules decay to the end of the run here"),
    "lr_schedule.auto_register": refused("code beside the YAML is never run"),
    "runner_wrapper.type": only(
        "MFTrainOneStepCell", reason="the only kind of step", otherwise="only MFTrainOneStepCell is a kind of step here"
    ),
    "runner_wrapper.sens": refused("a fixed loss scale is written as scale_sense"),
    "runner_wrapper.scale_sense": decided("runner_wrapper.scale_sense"),
    "runner_wrapper.scale_sense.type": decided("runner_wrapper.scale_sense.type"),
    "runner_wrapper.scale_sense.loss_scale_value": decided("runner_wrapper.scale_sense.loss_scale_value"),
    "runner_wrapper.scale_sense.scale_factor": decided("runner_wrapper.scale_sense.scale_factor"),
    "runner_wrapper.scale_sense.scale_window": decided("runner_wrapper.scale_sense.scale_window"),
    "runner_wrapper.use_clip_grad": used(),
    "runner_wrapper.max_grad_norm": used(),
    "runner_wrapper.local_norm": idle("it only prints"),
    "runner_wrapper.calculate_per_token_loss": idle("a token weighs the same wherever it falls"),
    "runner_wrapper.enable_check_overflow": idle("an update that is not finite is always left out"),
    "callbacks.[].type": decided("callbacks"),
    "callbacks.[].per_print_times": decided("callbacks.MFLossMonitor.per_print_times"),
    "callbacks.[].save_checkpoint_steps": decided("callbacks.CheckpointMonitor.save_checkpoint_steps"),
    "callbacks.[].keep_checkpoint_max": decided("callbacks.CheckpointMonitor.keep_checkpoint_max"),
    "callbacks.[].prefix": idle("checkpoints are named llm-STEP"),
    "callbacks.[].directory": idle("checkpoints stand in output_dir/checkpoint"),
    "callbacks.[].save_checkpoint_seconds": idle("checkpoints are written every save_checkpoint_steps"),
    "callbacks.[].keep_checkpoint_per_n_minutes": idle("the newest keep_checkpoint_max are kept"),
    "callbacks.[].integrated_save": idle(SAVED_WHOLE),
    "callbacks.[].async_save": idle(SAVED_WHOLE),
    "callbacks.[].save_network_params": idle(SAVED_WHOLE),
    "callbacks.[].save_trainable_params": idle(SAVED_WHOLE),
    "callbacks.[].save_optimizer": idle(SAVED_WHOLE),
    "callbacks.[].checkpoint_format": idle("checkpoints are safetensors"),
    "callbacks.[].remove_redundancy": idle(SAVED_WHOLE),
    "callbacks.[].embedding_local_norm_threshold": idle("it only watches"),
    "callbacks.[].keep_last": idle("nothing is uploaded"),
    "callbacks.[].upload_frequence": idle("nothing is uploaded"),
    "callbacks.[].step_interval": idle("it only watches"),
    **{
        f"callbacks.[].{key}": idle(EXPERTS)
        for key in [
            "balance_via_topk_bias",
            "expert_num",
            "micro_batch_num",
            "topk_bias_update_rate",
            "mtp_depth",
            "num_layers",
        ]
    },
}
WATCHERS = {
    "ObsMonitor": "nothing is uploaded",
    "SummaryMonitor": "callbacks: SummaryMonitor has keys of its own here",
    "ProfileMonitor": "the keys profile... say what is profiled",
    "ColdHotExpertMonitor": EXPERTS,
    "TopkBiasBalanceCallback": EXPERTS,
    "MoEDropRateCallback": EXPERTS,
    "MaxLogitsMonitor": "it only watches",
    "TrainingStateMonitor": "it only watches; MetricsMonitor writes loss, norm and rate",
    "StressDetectCallBack": "it only watches",
    "EvalCallBack": "do_eval and eval_step_interval say when to evaluate",
}
"""Callbacks without a counterpart, and why none is needed (experts themselves are refused)."""
