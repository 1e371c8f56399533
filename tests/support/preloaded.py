"""What every worker of the pool has from its start, read once and left alone by their garbage collectors."""

import gc

import torch
import torch.distributed.fsdp
import torch.distributed.tensor

import tests.parallel.parity_cases  # noqa: F401  (with all of the parallel room)

gc.freeze()
