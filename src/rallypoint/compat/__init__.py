"""The names of other packages, with the same meaning, so that users need to change only the import.

`rallypoint.compat.rendezvous` mirrors `torch.distributed.elastic.rendezvous`. It needs torch only for functions that
return objects of torch.
"""
