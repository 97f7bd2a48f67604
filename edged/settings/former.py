"""Names that settings had before: renamed ones keep their values, of removed ones the log says what holds instead.

They are read for one release.
"""

_POLICY = (
    *("idle_quantum_ms", "reader_reserve_s", "reader_horizon_s", "lambda_memory", "lambda_latency", "gamma"),
    *("tau_memory", "tau_tasks", "retrain_every_s", "retrain_window_s", "temporal_every", "slo_ms"),
)
_WEIGHTS = ("pair", "chosen", "edit", "regenerate", "thumbs", "rephrase", "dwell", "skip")
RENAMED = {
    "align.idle_passes": "align.practice",
    "align.idle_replay": "align.practice",
    "cache.prefix_sharing": "cache.share_across",
    "cache.spill": "cache.offload",
    "cache.spill_mb": "cache.offload_mb",
    "align.keep_graph": "align.recompute",
    **{f"scheduler.{name}": f"scheduler.options.{name}" for name in _POLICY},
    **{f"feedback.weight_{name}": f"feedback.weights.{name}" for name in _WEIGHTS},
}
"""Former names of settings, and their names now."""
MEANINGS = {"cache.prefix_sharing": dict.fromkeys(("false", "0", "no", "off", "n", "f"), "none")}
"""Renamed settings whose values have other names now, too; any other value is not carried over."""
_KERNELS = 'the fastest kernel that passes its test is used; model.kernels = "torch" does without edged\'s own'
REMOVED = {
    **{
        f"model.{name}": _KERNELS
        for name in (
            *("pack_weights", "cpu_kernels", "short_layers", "fp16_weights", "narrow_weights"),
            *("decode_attention", "prefill_attention", "lora_kernel", "fused_layers"),
        )
    },
    "model.keep_freed_memory": "freed memory is kept for the next iteration, and given back when idle",
    "feedback.suspicious_deviations": "a pair is suspicious from 6 deviations above the median loss",
    "feedback.burst_share": "half of 8 pairs that are suspicious are a burst",
    "feedback.alarm_s": "an alarm lasts an hour, or until somebody decides",
    "align.fill_ahead": 'memory decides; scheduler.policy = "flexllm-behind" does without',
    "align.weight_decay": "AdamW decays no weights",
    "align.max_grad_norm": "gradients are clipped to an L2 norm of 1",
    "api.max_stop_chars": "a stop string has up to 1,024 characters",
    "api.max_schema_kb": "a schema or grammar has up to 64 KiB",
    "api.max_logprobs": "an answer that is no stream has up to 131,072 log-probabilities",
    "cache.copy_states_every": "states are copied after 64 tokens of an answer",
    "cache.pruned_tokens": "a KV head keeps 512 old tokens on the mean",
    "cache.prune_recent": "every head keeps the latest 128 tokens",
    "cache.prune_window": "tokens that were unused for 256 iterations go first",
    "cache.prune_norm": "heads share what is kept by their norms",
    "fairness.input": "a prompt's token counts for 1",
    "fairness.output": "an answer's token counts for 2",
    "fairness.finetune": "training counts as a prompt's tokens of the same time",
    "fairness.finetune_counter": "training counts by itself",
    "fairness.run_headers": "clients name runs by X-Edged-Run, metadata.run or the usual headers of sessions",
    "governor.pressure_percent": "memory is short where tasks wait for it in 10 % of the time",
    "governor.temperature_margin_c": "fine-tuning slows down from 10 degrees below the limit",
    "guard.held_out_pairs": "up to 16 pairs of a user are held out; guard.held_out_share = 0 holds none out",
    "guard.held_out_age": "a held-out pair is trained on after 200 others",
    "guard.min_pairs": "the guard judges from 4 held-out pairs on",
    "guard.evaluate_every": "a test follows after 8 versions at the latest",
    "guard.max_accuracy_drop": "a version may lose 0.34 of the held-out reward accuracy",
    "jobs.max_file_mb": "a file may have as much as jobs.files_mb leaves",
    "jobs.max_files": "up to 100 files of an account are kept",
    "jobs.max_adapters": "the jobs of an account make up to 32 adapters",
    **dict.fromkeys(
        ("limits.header_s", "limits.body_s", "limits.idle_s", "limits.stalled_s"),
        "10 s for a header, 30 s for a body, 75 s between requests and 30 s with a full buffer, times limits.patience",
    ),
    "store.keep_samples": "20,000 iteration samples are kept",
    "model.huge_pages": "GLIBC_TUNABLES=glibc.malloc.hugetlb=0 in the environment does without",
    "log.slow_ttft_s": "a request whose first token took 10 s is a warning",
    "reading.ttft_ms": "a first token within a second is no wait for a reader",
    "scheduler.plan_ahead": "the next iteration is planned while one runs on CUDA",
    "scheduler.batch_ttft_factor": "a TTFT target of the batch class is 50 times the prompt's own latency",
    "scheduler.batch_ttft_floor_ms": "a TTFT target of the batch class is 5 s at least",
    "scheduler.batch_tbt_factor": "a TBT target of the batch class is 10 times the decodes' latency",
    "scheduler.batch_tbt_floor_ms": "a TBT target of the batch class is 500 ms at least",
}
"""Settings that are no more, and what holds instead."""
