"""The torchrun backend `quorate`, and the store of a round as a `torch.distributed.Store`. Needs torch.

torchrun --rdzv-backend=quorate --rdzv-endpoint=head:29400 --rdzv-id=my-run --nnodes=2:4 train.py

world = quorate.create_handler(url).next_rendezvous()
torch.distributed.init_process_group(
    "gloo", store=TorchStore(world.store), rank=world.rank, world_size=world.world_size
)
"""

from quorate.integrations.torchrun.handler import TorchrunHandler, create_handler
from quorate.integrations.torchrun.store import TorchStore

__all__ = ["TorchStore", "TorchrunHandler", "create_handler"]
