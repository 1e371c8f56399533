"""A module of your own under a plan: `torchrun --nproc-per-node 2 examples/parallelize.py tensor=2`."""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import meshwright

VOCAB, WIDTH, LENGTH, MICROBATCHES = 256, 64, 32, 2


class Speller(nn.Module):
    """Nobody annotated it, and it knows nothing of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.head(self.body(self.table(tokens), mask=mask, is_causal=True))


def main() -> None:
    dist.init_process_group("gloo")
    degrees = {name: int(size) for name, _, size in (word.partition("=") for word in sys.argv[1:])}
    plan = meshwright.plan_of_degrees(**degrees, recompute="full", precision="fp32", microbatches=MICROBATCHES)
    laid = meshwright.parallelize(Speller(), plan, example=(torch.zeros(1, LENGTH, dtype=torch.int64),))
    optimizer = torch.optim.AdamW(laid.module.parameters(), lr=1e-2)
    if dist.get_rank() == 0:
        print(plan.describe())
        print(laid.rules.describe())
    text = torch.arange(LENGTH + 1)[None].repeat(4, 1) % 7
    for step in range(5):
        for index in range(MICROBATCHES):
            logits = laid.module(text[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
            laid.backward(loss / MICROBATCHES, last=index == MICROBATCHES - 1)
        norm = laid.clip_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} loss {float(loss.detach()):.3f} gradient norm {float(norm):.3f}")
    state = laid.state_dict()  # whole tensors by the names of your module, on every rank
    if dist.get_rank() == 0:
        print(f"{len(state)} tensors, {sum(x.numel() for x in state.values()):,} elements")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
