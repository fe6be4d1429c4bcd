"""What settings of TRL's GRPOConfig, and of other trainers, are called here.

A value that begins with -- is what to write; any other one says why there is none.
"""

ALWAYS = "that is always so"
HARDWARE = "what fits is found at the start, and changes no gradient"
ONE_PROCESS = "vLLM samples in this process, from the weights that are trained (--sampler vllm)"
OTHER_LOSS = "no loss here has it; --algo lists those that there are, or takes FILE.py of your own"
NO_ENTROPY_TARGET = "--entropy-coef stays as it is"
PAGES = "every rollout is in runs/NAME/rollouts.jsonl, and some are in report.html"
TEXT_ONLY = "models for text only"
NOTHING = "nothing depends on it here"
HUB = "runs/NAME/model is what a hub takes"

OTHER_NAMES = {
    # as other trainers call it
    "environment": "--env",
    "num_steps": "--num-updates",
    "learning_rate": "--lr",
    "batch_size": "--num-prompts, and --group-size rollouts of each",
    # what GRPOConfig adds
    "model_init_kwargs": "--dtype, --quantize, --max-model-len",
    "beta": "--kl-coef",
    "trust_remote_code": "no code that comes with a model runs",
    "router_aux_loss_coef": OTHER_LOSS,
    "disable_dropout": ALWAYS,
    "cast_lm_head_to_fp32": "--fp32-head",
    "num_generations": "--group-size",
    "num_generations_eval": "--eval-samples",
    "max_completion_length": "--max-tokens",
    "max_prompt_length": "--max-model-len, of prompt and answers together",
    "ds3_gather_for_generation": ONE_PROCESS,
    "shuffle_dataset": "--env rewarded:..,order=shuffled, or order=data for False",
    "pad_to_multiple_of": "there is no padding",
    "generation_batch_size": "--num-prompts, times --group-size",
    "steps_per_generation": "--num-minibatches",
    "generation_kwargs": "--temperature, --top-p, --top-k, --min-p, --stop",
    "chat_template_kwargs": "--template-options",
    "repetition_penalty": "what is sampled is trained; a reward function may ask for variety",
    "cache_implementation": NOTHING,
    "use_vllm": "--sampler vllm",
    "vllm_mode": "--sampler vllm (colocate) or --sampler server",
    "vllm_model_impl": NOTHING,
    "vllm_enable_sleep_mode": ALWAYS,
    "vllm_structured_outputs_regex": "answers of agents follow a JSON schema",
    "vllm_server_base_url": "--base-url, with --sampler server",
    "vllm_server_host": "--base-url, with --sampler server",
    "vllm_server_port": "--base-url, with --sampler server",
    "vllm_server_timeout": NOTHING,
    "vllm_group_port": "servers get adapters as files (--adapter-folder)",
    "vllm_gpu_memory_utilization": "--gpu-memory-utilization",
    "vllm_max_model_length": "--max-model-len",
    "vllm_tensor_parallel_size": "one GPU samples for each process of torchrun",
    "num_iterations": "--num-epochs",
    "epsilon": "--grpo.clip-low",
    "epsilon_high": "--grpo.clip-high",
    "delta": "--grpo.dual-clip",
    "sapo_temperature_neg": OTHER_LOSS,
    "sapo_temperature_pos": OTHER_LOSS,
    "vespo_k_pos": OTHER_LOSS,
    "vespo_lambda_pos": OTHER_LOSS,
    "vespo_k_neg": OTHER_LOSS,
    "vespo_lambda_neg": OTHER_LOSS,
    "importance_sampling_level": "--algo gspo for sequence",
    "reward_weights": "--env rewarded:..,weights=1 0.5",
    "multi_objective_aggregation": "--algo gdpo for normalize_then_sum",
    "scale_rewards": "--grpo.scale-rewards",
    "loss_type": "--grpo.loss-type, or --algo cispo",
    "sync_ref_model": "the reference of --kl-coef stays as it is",
    "ref_model_mixup_alpha": "the reference of --kl-coef stays as it is",
    "ref_model_sync_steps": "the reference of --kl-coef stays as it is",
    "top_entropy_quantile": OTHER_LOSS,
    "use_adaptive_entropy": NO_ENTROPY_TARGET,
    "entropy_coef_min": NO_ENTROPY_TARGET,
    "entropy_coef_max": NO_ENTROPY_TARGET,
    "entropy_coef_delta": NO_ENTROPY_TARGET,
    "entropy_target": NO_ENTROPY_TARGET,
    "max_tool_calling_iterations": "--max-turns",
    "vllm_importance_sampling_correction": "--tis-cap; 0 is False",
    "vllm_importance_sampling_mode": "--tis-level and --tis-mode",
    "vllm_importance_sampling_clip_max": "--tis-cap",
    "vllm_importance_sampling_cap": "--tis-cap",
    "vllm_importance_sampling_clip_min": "--tis-mode mask drops ratios below 1 / --tis-cap, too",
    "off_policy_mask_threshold": "--algo opsm --opsm.limit",
    "use_bias_correction_kl": "the KL term always has the ratio of the policies",
    "log_completions": PAGES,
    "num_completions_to_print": PAGES,
    "log_unique_prompts": PAGES,
    "log_completions_hub_repo": PAGES,
    "log_multimodal": TEXT_ONLY,
    "use_transformers_continuous_batching": "--sampler torch always does so",
    "transformers_continuous_batching_config": "--sampler torch always does so",
    "use_transformers_paged": "--sampler torch always does so",
    # of its TrainingArguments, what recipes set
    "output_dir": "--run-name, of a folder in runs/",
    "num_train_epochs": "--num-updates, of --num-prompts rows each",
    "max_steps": "--num-updates",
    "per_device_train_batch_size": "--max-tokens-per-micro-batch; "
    "by default what fits, which changes no gradient",
    "per_device_eval_batch_size": HARDWARE,
    "gradient_accumulation_steps": "--num-minibatches is the number of steps of an update",
    "auto_find_batch_size": ALWAYS,
    "lr_scheduler_type": "--lr-schedule",
    "lr_scheduler_kwargs": "--lr-schedule and --warmup-updates",
    "warmup_steps": "--warmup-updates",
    "warmup_ratio": "--warmup-updates",
    "weight_decay": "there is no weight decay",
    "adam_beta1": "Adam's are 0.9, 0.999 and 1e-8",
    "adam_beta2": "Adam's are 0.9, 0.999 and 1e-8",
    "adam_epsilon": "Adam's are 0.9, 0.999 and 1e-8",
    "optim": "--optimizer",
    "optim_args": "--optimizer",
    "bf16": "--dtype bfloat16",
    "fp16": "--dtype float16",
    "tf32": NOTHING,
    "gradient_checkpointing_kwargs": "--gradient-checkpointing",
    "logging_steps": "every update is logged",
    "logging_strategy": "every update is logged",
    "logging_first_step": "every update is logged",
    "report_to": "--track",
    "eval_strategy": "--eval-every",
    "eval_steps": "--eval-every",
    "do_eval": "--eval-every",
    "eval_on_start": ALWAYS,
    "save_strategy": "--save-every",
    "save_steps": "--save-every",
    "save_total_limit": "the two newest checkpoints are kept",
    "load_best_model_at_end": "--keep-best",
    "early_stopping_patience": "--patience",
    "resume_from_checkpoint": "--resume",
    "push_to_hub": HUB,
    "hub_model_id": HUB,
    "data_seed": "--seed",
    "remove_unused_columns": "reward functions get all columns",
    "deepspeed": "--shard-optimizer under torchrun",
    "fsdp": "--shard-optimizer under torchrun",
    "use_liger_kernel": NOTHING,
    "torch_compile": NOTHING,
    "use_cpu": "--device cpu",
    # of GRPOTrainer itself
    "model": "--model-id",
    "model_name_or_path": "--model-id",
    "reward_funcs": "--env rewarded:data=..,reward=FILE.py:function",
    "train_dataset": "--env rewarded:data=..",
    "dataset_name": "--env rewarded:data=..",
    "eval_dataset": "--eval-env rewarded:data=..",
    "peft_config": "--lora-rank",
    "lora_r": "--lora-rank",
    "quantization_config": "--quantize nf4",
    "load_in_4bit": "--quantize nf4",
    "tools": "--env rewarded:..,tools=FILE.py:function",
    "environment_factory": "--env rewarded:..,environment=FILE.py:Class",
}


def advice_for(name: str) -> str:
    """What to do instead of a setting of this name; "" if it is unknown. Hyphens count as
    underscores.

    >>> advice_for("num-generations"), advice_for("disable_dropout"), advice_for("x")
    ('write --group-size', 'picoRL has none: that is always so', '')
    """
    found = OTHER_NAMES.get(name.lower().replace("-", "_"), "")
    return f"write {found}" if found[:2] == "--" else f"picoRL has none: {found}" if found else ""
