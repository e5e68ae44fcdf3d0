"""Make rollouts for grpo_offline.yaml: a small model answers prompts, and answers with more even bytes get a larger reward.

    python examples/make_rollouts.py            # writes runs/rollouts/model and runs/rollouts/rows.jsonl
    python examples/make_rollouts.py --model runs/grpo_offline/export    # prints the mean reward of another model

In earnest, an engine such as vLLM makes the rows, and a verifier the rewards.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from meshwright.data import train_tokenizer

PROMPTS = [f"Count to {number}:" for number in range(24)]
GROUP, LENGTH = 8, 12


def new_model(folder: Path) -> None:
    """Write a model with random weights, and a tokenizer."""
    tokenizer = train_tokenizer(PROMPTS, 280)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def rollouts(folder: Path, seed: int = 0) -> list[dict[str, object]]:
    """Return rows of rollouts: GROUP answers of a model to each prompt."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(seed)
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        both = ids.repeat(GROUP, 1)
        for _ in range(LENGTH):
            logs = model(both).logits[:, -1].log_softmax(-1)
            both = torch.cat([both, torch.multinomial(logs.exp(), 1)], 1)
        logs = model(both).logits[:, ids.shape[1] - 1 : -1].log_softmax(-1)
        said = both[:, ids.shape[1] :]
        old = logs.gather(-1, said.unsqueeze(-1)).squeeze(-1)
        for answer, values in zip(said.tolist(), old.tolist(), strict=True):
            reward = sum(token % 2 == 0 for token in answer) / LENGTH
            row = {"prompt_ids": ids[0].tolist(), "completion_ids": answer, "old_log_probs": values}
            found.append({**row, "reward": reward, "group": prompt})
    return found


def mean_reward(rows: list[dict[str, object]]) -> float:
    """Return the mean reward of rows."""
    return sum(float(str(row["reward"])) for row in rows) / len(rows)


def main() -> None:
    """Write the rows of a new model, or print the mean reward of one that was trained."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="print the mean reward of this model")
    parser.add_argument("--output", type=Path, default=Path("runs/rollouts"))
    arguments = parser.parse_args()
    if arguments.model is not None:
        print(f"mean reward {mean_reward(rollouts(arguments.model, seed=1)):.3f}")
        return
    new_model(arguments.output / "model")
    rows = rollouts(arguments.output / "model")
    (arguments.output / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} rollouts, mean reward {mean_reward(rows):.3f}")


if __name__ == "__main__":
    main()
