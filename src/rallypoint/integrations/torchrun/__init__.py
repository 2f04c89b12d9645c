"""The torchrun backend `rallypoint`, and the store of a round as a `torch.distributed.Store`. Needs torch.

torchrun --rdzv-backend=rallypoint --rdzv-endpoint=head:29400 --rdzv-id=my-run --nnodes=2:4 train.py

world = rallypoint.create_handler(url).next_rendezvous()
torch.distributed.init_process_group(
    "gloo", store=TorchStore(world.store), rank=world.rank, world_size=world.world_size
)
"""

from rallypoint.integrations.torchrun.handler import TorchrunHandler, create_handler
from rallypoint.integrations.torchrun.store import TorchStore

__all__ = ["TorchStore", "TorchrunHandler", "create_handler"]
