"""A process that joins a run and makes a process group on the store of its round: member.py URL."""

import sys

import torch
import torch.distributed as dist

import rallypoint
from rallypoint.integrations.torchrun import TorchStore

handler = rallypoint.create_handler(sys.argv[1])
world = handler.next_rendezvous()
dist.init_process_group("gloo", store=TorchStore(world.store), rank=world.rank, world_size=world.world_size)
total = torch.tensor([float(world.rank + 1)])
dist.all_reduce(total)
print("rank", world.rank, "sum", total.item())
dist.barrier()
dist.destroy_process_group()
handler.close()
