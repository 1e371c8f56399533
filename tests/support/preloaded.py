# ruff: noqa: F401
"""What every worker and command has from its start, read once and left alone by their garbage collectors."""

import gc

import torch.distributed.fsdp
import torch.distributed.tensor

import meshwright.api
import meshwright.cli.app
import meshwright.export
import meshwright.report
import meshwright.search
import tests.parallel.parity_cases

gc.freeze()
