"""Train every architecture of transformers, shrunk and random, offloaded and in plain PyTorch; compare bit for bit.

Owns the shrinking of configurations, the batches, and the account. Does not know architectures: what plain PyTorch
cannot train as it is made here (a model that wants other inputs, or cannot be shrunk so) is counted and left out.
Guarantees that a model gets a process and a time limit of its own, and that an architecture counts as trained only if
losses, weights and buffers after two steps in float32, and what it generates after that, are those of plain PyTorch.

    python tools/architectures.py --directory /nvme0/tmp --task causal masked

Needs transformers. Minutes for a task; not a part of `make test`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TASKS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "text and image": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "segmentation": "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES",
    "detection": "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES",
    "video": "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES",
}
# Names of a configuration's numbers, and what they become if they are larger; the first that matches counts.
SMALL = (
    (r".*vocab_size.*", 160),
    (r".*key_value_heads|num_kv_heads", 2),
    (r".*(attention_heads|num_heads|n_heads?|linear_num_.*heads)", 4),
    (r".*(head_dim|d_kv|head_size|d_head)|q_lora_rank|kv_lora_rank", 8),
    (r".*(n_routed_experts|num_experts|num_local_experts|n_experts)", 4),
    (r".*(experts_per_tok|top_k|num_experts_per_token|moe_topk)", 2),
    (r".*(intermediate_size|ffn_dim|ffn_hidden_size|d_ff|n_inner|intermediate_dim|mlp_dim|ff_dim|expert_dim)", 64),
    (r".*(hidden_size|d_model|n_embd|embed_dim|embedding_size|hidden_dim|projection_dim|lru_width)|dim", 32),
    (r".*(num_hidden_layers|num_layers|n_layers?|encoder_layers|decoder_layers|depth|num_.*_layers)", 2),
    (r".*(max_position_embeddings|n_positions|max_seq_len|n_ctx|max_source_positions|max_target_positions)", 128),
    (r"mamba_d_state|state_size|ssm_state_size|d_state|time_step_rank|mamba_dt_rank", 8),
    (r"image_size", 32),
    (r"sliding_window|window_size|attention_window", 16),
)
# What is not shrunk, tried in this order until plain PyTorch trains the model.
SPARED = (
    r"$^",
    r".*(head_dim|d_kv|head_size|d_head|heads?)|.*lora_rank|.*_dim",
    r".*(head|size|model|embd|dim|rank|embed).*",
)
LARGEST = 60_000_000  # parameters
STEPS = 2
LIMIT = 180.0  # seconds
# Forked from one that has imported what all need: that takes longer than most models' training.
PROCESSES = multiprocessing.get_context("forkserver")


@dataclass(frozen=True, slots=True)
class Found:
    """What came of one architecture: "trained", "not in plain PyTorch", or what went wrong; and a word on it."""

    task: str
    kind: str
    model: str
    outcome: str
    detail: str = ""


class Unfit(Exception):  # noqa: N818 - not an error of ours
    """Plain PyTorch does not train the model as it is made here."""


def main() -> None:
    """Go through the tasks; print a line for each architecture that was not trained, and the sums."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(), help="where swap files go (default: here)")
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS), help="default: all")
    parser.add_argument("--only", default="", help="architectures whose name matches this expression")
    parser.add_argument("--at-once", type=int, default=2, help="processes")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    from transformers.models.auto import modeling_auto

    PROCESSES.set_forkserver_preload(["torch", "transformers", "tiermem"])
    todo = [
        (task, kind, name if isinstance(name, str) else name[0])
        for task in options.task
        for kind, name in getattr(modeling_auto, TASKS[task]).items()
        if re.search(options.only, kind)
    ]
    with ThreadPoolExecutor(options.at_once) as pool:
        found = list(pool.map(lambda each: report(in_a_process(each, options.directory)), todo))
    for task in options.task:
        counts = Counter(each.outcome for each in found if each.task == task)
        print(f"{task}: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")


def report(found: Found) -> Found:
    """Say what went wrong, as it comes."""
    if found.outcome not in ("trained", "not in plain PyTorch"):
        print(f"{found.task}: {found.kind} ({found.model}): {found.outcome}: {found.detail}", flush=True)
    return found


def in_a_process(each: tuple[str, str, str], directory: Path) -> Found:
    """Train one in a process of its own."""
    ours, theirs = PROCESSES.Pipe(duplex=False)
    child = PROCESSES.Process(target=live, args=(theirs, *each, directory))
    child.start()
    theirs.close()
    try:
        if not ours.poll(LIMIT):
            return Found(*each, "not finished", f"after {LIMIT:.0f} s")
        return Found(**ours.recv())
    except EOFError:
        child.join()
        return Found(*each, "died", f"exit code {child.exitcode}")
    finally:
        child.kill()
        child.join()


def live(answer: Any, task: str, kind: str, name: str, directory: Path) -> None:
    """In the process: train one, and send what came of it."""
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    answer.send(asdict(train_one(task, kind, name, directory)))


def train_one(task: str, kind: str, name: str, directory: Path) -> Found:
    """Train an architecture both ways."""
    why = ""
    for spared in SPARED:
        try:
            outcome, detail = compare(task, kind, name, spared, directory)
        except Unfit as reason:
            why = why or str(reason)
        else:
            return Found(task, kind, name, outcome, detail)
    return Found(task, kind, name, "not in plain PyTorch", why)


def compare(task: str, kind: str, name: str, spared: str, directory: Path) -> tuple[str, str]:
    """The outcome. Raises Unfit if the plain model does not train, or not twice alike."""
    import torch

    import tiermem

    def adamw(parameters: Any, lr: float) -> Any:
        return torch.optim.AdamW(parameters, lr=lr, fused=True)

    try:
        model, again = make(kind, name, spared), make(kind, name, spared)
        again.load_state_dict(begun := {key: value.clone() for key, value in model.state_dict().items()})
        losses, repeated = train(task, model, adamw), train(task, again, adamw)
        alike = losses == repeated and all(map(torch.equal, model.parameters(), again.parameters()))
    except Exception as error:
        raise Unfit(f"{type(error).__name__}: {error}"[:200]) from error
    if not alike:
        raise Unfit("not the same numbers twice, or none")
    state = 16 * sum(parameter.numel() for parameter in model.parameters())
    for budget in (state // 10, state):
        ours = make(kind, name, spared)
        ours.load_state_dict(begun)
        try:
            return difference(task, model, ours, losses, budget, directory)
        except tiermem.CapacityError as error:  # one operation reads several large parameters that belong to others
            detail = f"CapacityError: {error}"
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what there is to tell
            return "failed", f"{type(error).__name__}: {error}"[:400]
    return "failed", detail[:400]


def difference(task: str, model: Any, ours: Any, losses: list[float], budget: int, directory: Path) -> tuple[str, str]:
    """Train `ours` offloaded and compare it with `model`, which had these losses."""
    import torch

    import tiermem

    with tempfile.TemporaryDirectory(dir=directory) as swap, offloaded(ours, budget, swap) as runtime:
        if train(task, ours, tiermem.AdamW) != losses:
            return "another loss", ""
        for (place, one), other in zip(model.named_parameters(), ours.parameters(), strict=True):
            if not torch.equal(runtime.parameter(other), one.detach()):
                return "other weights", place
        if not all(map(torch.equal, model.buffers(), ours.buffers())):
            return "other buffers", ""
        if task in ("causal", "seq2seq") and generated(model) not in (None, generated(ours)):
            return "generates something else", ""
    return "trained", ""


def offloaded(model: Any, budget: int, swap: str) -> Any:
    """The runtime of a model with this budget of host memory, or a tenth more than the least that works."""
    import tiermem

    while True:
        config = tiermem.Config(
            host_memory=budget, swap_dirs=[swap], param_dtype="float32", poison=True, device="cpu", stall_timeout=30.0
        )
        try:
            return tiermem.offload(model, config)
        except tiermem.CapacityError as error:
            least = re.search(r"set host_memory to (\d+) bytes", str(error))
            if least is None:
                raise
            budget = int(least.group(1)) * 11 // 10


def make(kind: str, name: str, spared: str) -> Any:
    """The model, from always the same numbers. Raises Unfit if it is too large."""
    import torch
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kinds: Any = CONFIG_MAPPING
    config = shrunk(kinds[kind](), spared)
    cls = getattr(transformers, name)
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in cls(config).parameters())
    if numel > LARGEST:
        raise Unfit(f"{numel} parameters")
    torch.manual_seed(0)
    return cls(config).train()


def shrunk(config: Any, spared: str, depth: int = 0) -> Any:
    """The configuration with smaller numbers, its parts included."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and depth < 3:
            shrunk(value, spared, depth + 1)
        elif name.endswith(("token_id", "token_index")) and isinstance(value, int) and value >= 100:
            setattr(config, name, 2)
        elif name.endswith(("layer_types", "block_type")) and isinstance(value, (list, tuple)):
            setattr(config, name, type(value)((list(dict.fromkeys(value)) * 2)[:2]))
        elif not name.startswith("_") and not re.fullmatch(spared, name):
            small = next((small for pattern, small in SMALL if re.fullmatch(pattern, name)), None)
            if small is not None and isinstance(value, int) and not isinstance(value, bool) and value > small:
                setattr(config, name, small)
    return config


def train(task: str, model: Any, optimizer: Callable[..., Any]) -> list[float]:
    """The losses of a few steps."""
    import torch

    adamw, losses = optimizer(model.parameters(), lr=1e-3), []
    for number in range(STEPS):
        torch.manual_seed(number)
        found = model(**batch(task, model.config))
        loss = found.loss if getattr(found, "loss", None) is not None else found.logits.float().square().mean()
        loss.backward()
        adamw.step()
        adamw.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def batch(task: str, config: Any) -> dict[str, Any]:
    """Inputs and labels."""
    import torch

    size = getattr(config, "image_size", 32) or 32
    height, width = size[-2:] if isinstance(size, (list, tuple)) else (size, size)
    channels = getattr(config, "num_channels", 3) or 3
    pixels = torch.randn(2, channels, height, width)
    if task == "video":
        pixels = torch.randn(2, getattr(config, "num_frames", 8), channels, height, width)
    if task in ("image", "video"):
        return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}
    if task == "segmentation":
        return {"pixel_values": pixels, "labels": torch.zeros(2, height, width, dtype=torch.long)}
    if task == "detection":
        return {"pixel_values": pixels}
    tokens = torch.randint(3, 90, (2, 10))
    return {"input_ids": tokens, "labels": tokens[:, :6].contiguous() if task == "seq2seq" else tokens}


def generated(model: Any) -> list[int] | None:
    """A few tokens; None where the model does not generate."""
    import torch

    tokens = torch.arange(3, 9).unsqueeze(0)
    try:
        return list(model.eval().generate(input_ids=tokens, max_new_tokens=4, do_sample=False)[0].tolist())
    except Exception:  # noqa: BLE001 - asked of the plain model first: if it cannot, nothing is compared
        return None


if __name__ == "__main__":
    main()
