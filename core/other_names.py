"""What settings of TRL's GRPOTrainer, of verl and of other trainers are called here.

A value that begins with -- is what to write in their place; any other one is the reason why no flag
has that meaning. environments/README.md has the rows as a table.
"""

MINIBATCHES = "gradient steps in a pass over the rollouts are counted: --num-minibatches"
OTHER_NAMES = {
    "model model_name_or_path": "--model-id",
    "peft_config lora_r": "--lora-rank",
    "lora_alpha": "it is twice the rank: --lora-rank",
    "quantization_config load_in_4bit": "--quantize nf4",
    "bf16 fp16": "--dtype bfloat16 or float16",
    "chat_template_kwargs": "--template-options",
    "reward_funcs": "--env rewarded:data=..,reward=FILE.py:function",
    "reward_weights": "--env rewarded:data=..,reward=..,weights=1 0.5",
    "train_dataset dataset_name": "--env rewarded:data=..,reward=..",
    "eval_dataset": "--eval-env rewarded:data=..,reward=..",
    "tools": "--env rewarded:data=..,reward=..,tools=FILE.py:function",
    "environment_factory": "--env rewarded:data=..,reward=..,environment=FILE.py:Class",
    "num_generations": "--group-size",
    "train_batch_size": "--num-prompts",
    "batch_size generation_batch_size": "an update has --num-prompts times --group-size rollouts",
    "max_steps num_steps": "--num-updates",
    "num_train_epochs total_epochs": "updates of --num-prompts tasks are counted: --num-updates",
    "max_completion_length max_response_length max_new_tokens": "--max-tokens",
    "max_prompt_length": "prompts and answers have one limit together: --max-model-len",
    "max_tool_calling_iterations": "answers are counted, the last one, too: --max-turns",
    "learning_rate": "--lr",
    "lr_scheduler_type": "--lr-schedule",
    "warmup_steps warmup_ratio": "updates are counted: --warmup-updates",
    "weight_decay": "there is no weight decay",
    "adam_beta1 adam_beta2 adam_epsilon": "they are 0.9, 0.999 and 1e-8",
    "optim": "--optimizer",
    "num_iterations ppo_epochs": "--num-epochs",
    "steps_per_generation gradient_accumulation_steps ppo_mini_batch_size": MINIBATCHES,
    "per_device_train_batch_size ppo_micro_batch_size_per_gpu": (
        "what fits is found at the start, and changes no gradient: --max-tokens-per-micro-batch"
    ),
    "loss_type": "--grpo.loss-type",
    "importance_sampling_level": "--algo gspo for sequence",
    "epsilon clip_ratio_low": "--grpo.clip-low",
    "epsilon_high clip_ratio_high": "--grpo.clip-high",
    "clip_ratio": "--grpo.clip-low and --grpo.clip-high",
    "delta clip_ratio_c": "there is no second clip",
    "beta kl_loss_coef": "--kl-coef",
    "entropy_coeff": "--entropy-coef",
    "entropy_coef_min entropy_coef_max": "the coefficient stays as it is: --entropy-coef",
    "vllm_importance_sampling_clip_max": "--tis-cap",
    "vllm_importance_sampling_clip_min": "--tis-mode mask, which drops below 1 / --tis-cap",
    "vllm_importance_sampling_mode": "--tis-level and --tis-mode",
    "vllm_importance_sampling_correction": "--tis-cap 0 for False",
    "stop_strings": "--stop",
    "generation_kwargs": "--temperature, --top-p, --top-k and --stop",
    "use_vllm": "--sampler vllm",
    "vllm_mode": "--sampler vllm for colocate, --sampler server for server",
    "vllm_server_base_url": "--base-url",
    "vllm_gpu_memory_utilization": "--gpu-memory-utilization",
    "vllm_max_model_length": "--max-model-len",
    "deepspeed fsdp": "one GPU holds the model",
    "eval_strategy eval_steps test_freq": "--eval-every",
    "save_strategy save_steps save_freq": "--save-every",
    "load_best_model_at_end": "the model of the last update is exported",
    "resume_from_checkpoint": "--resume",
    "output_dir": "all runs are in runs/, in a folder that --run-name names",
    "report_to": "--track",
}
ADVICE = {name: said for names, said in OTHER_NAMES.items() for name in names.split()}


def advice_for(name: str) -> str:
    """What to do instead of a setting of this name; "" if it is unknown.

    >>> advice_for("num-generations"), advice_for("weight_decay"), advice_for("x")
    ('write --group-size', 'there is no weight decay', '')
    """
    found = ADVICE.get(name.lower().replace("-", "_"), "")
    return f"write {found}" if found.startswith("--") else found
