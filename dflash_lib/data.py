"""From files of conversations to the batches of every step: the parts that others call, under one name.

conversations.py  lines -> conversations, or left out with a reason
chat.py           conversations -> text -> token ids with a response mask, as the target is served
rows.py           the dataset, and its report
batches.py        buckets, order, packing, batches of every step and lane
regenerate.py     conversations that the target writes itself
"""

from __future__ import annotations

from dflash_lib.batches import RowBatch, RowStream, buckets, order
from dflash_lib.conversations import Conversation, DataError, LeftOut, Message, read
from dflash_lib.regenerate import regenerate
from dflash_lib.rows import Dataset, Row, load

__all__ = [
    "Conversation",
    "DataError",
    "Dataset",
    "LeftOut",
    "Message",
    "Row",
    "RowBatch",
    "RowStream",
    "buckets",
    "load",
    "order",
    "read",
    "regenerate",
]
