"""Names that users import already, with the same meaning here.

`rallypoint.compat.rendezvous` mirrors `torch.distributed.elastic.rendezvous`: change the import and go on. It does not
need torch, except where torch's own things are asked for.
"""
