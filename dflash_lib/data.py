"""INTERIM stand-in until branch target's data.py arrives."""
from __future__ import annotations
from dataclasses import dataclass, field
import torch

@dataclass
class Row:
    id: int
    input_ids: list[int]
    response_mask: list[bool]
    source: str = ""

@dataclass
class Dataset:
    rows: list[Row]
    left_out: list = field(default_factory=list)

@dataclass
class RowBatch:
    row_ids: list[int]
    epoch: int
    input_ids: torch.Tensor
    response_mask: torch.Tensor
    document_ids: torch.Tensor | None
    bucket: int
    @property
    def tokens(self): return int(self.input_ids.numel())

def load(*a, **k): raise NotImplementedError
def buckets(lengths, max_buckets=6, multiple=128):
    return [-(-max(lengths) // multiple) * multiple]
def order(rows, seed, epoch):
    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed * 1000003 + epoch)).tolist()
